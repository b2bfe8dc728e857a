"""Rules for how the files of a model family hold its tensors: data, which `kumi.spec.weights` reads both ways.

Inside of kumi every family has the same names, those of Llama where it has the part, and the same shapes: query, key
and value apart, gate and up apart (side by side in routed experts), matrices as (out, in), all experts of a layer in
one tensor. A rule names modules or tensors by their path within a layer (or, outside of layers, from the top); what
follows of a tensor's name, such as ".weight", is the same in files.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rename:
    """`native` is called `stored` in files, and its matrices lie there as (in, out) where it is `transposed`."""

    native: str
    stored: str
    transposed: bool = False


@dataclass(frozen=True)
class Rows:
    """The rows of all `natives` are one matrix in files, one below the other; (in, out) where it is `transposed`."""

    natives: tuple[str, ...]
    stored: str
    transposed: bool = False


@dataclass(frozen=True)
class Groups:
    """Queries, keys and values are one matrix in files: for every key-value head its queries' rows, its key's, its
    value's."""

    natives: tuple[str, str, str]
    stored: str


@dataclass(frozen=True)
class Stack:
    """A tensor (X, N * A, B), in files N matrices (A, B) for each of X, named `pieces` with X's number for {}."""

    native: str
    pieces: tuple[str, ...]


@dataclass(frozen=True)
class Pairs:
    """A tensor (X, 2 * A, ...), in files (X, ..., 2 * A) with its halves in turn: first, second, first..."""

    native: str
    stored: str


Rule = Rename | Rows | Groups | Stack | Pairs


@dataclass(frozen=True)
class Weights:
    """How the files of a family hold its tensors.

    Of `rules`, for tensors within layers, the first that fits counts. `prefixes` then replace beginnings of whole
    names: again the first that fits. `base` is a prefix that some files leave out altogether, having been saved without
    a head. Tensors in files whose names end in one of `ignored` are no part of the model.
    """

    rules: tuple[Rule, ...] = ()
    prefixes: tuple[tuple[str, str], ...] = ()
    base: str = ""
    ignored: tuple[str, ...] = (".rotary_emb.inv_freq",)
    carried: tuple[str, ...] = ()


PLAIN = Weights()
QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
# One matrix in one file for each matrix of each expert.
EXPERTS = Weights(
    (
        Stack("mlp.experts.gate_up_proj", ("mlp.experts.{}.gate_proj.weight", "mlp.experts.{}.up_proj.weight")),
        Stack("mlp.experts.down_proj", ("mlp.experts.{}.down_proj.weight",)),
    )
)
