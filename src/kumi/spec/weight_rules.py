"""Rules for the format of a model family's tensors in files. `kumi.spec.weights` applies them in both directions.

Inside kumi, all families have the same native names (those of Llama, where Llama has the part) and the same shapes:
query, key and value are separate, gate and up are separate (fused in routed experts), matrices are (out, in), and all
experts of a layer are one tensor. A rule names modules or tensors by their path within a layer, or outside of layers
by their full path. The end of a tensor's name, such as ".weight", is the same in kumi and in files.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rename:
    """`native` has the name `stored` in files. If `transposed`, matrices are stored as (in, out)."""

    native: str
    stored: str
    transposed: bool = False


@dataclass(frozen=True)
class Rows:
    """The rows of all `natives` are concatenated to one matrix in files. If `transposed`, it is stored as (in, out)."""

    natives: tuple[str, ...]
    stored: str
    transposed: bool = False


@dataclass(frozen=True)
class Groups:
    """Queries, keys and values are one matrix in files: for each key-value head, the rows of its queries, key and
    value."""

    natives: tuple[str, str, str]
    stored: str


@dataclass(frozen=True)
class Stack:
    """A tensor (X, N * A, B) of X experts is stored as X * N matrices (A, B), N of each expert.

    `pieces`: the names of the N matrices of one expert, with {} for the index of the expert.
    """

    native: str
    pieces: tuple[str, ...]


@dataclass(frozen=True)
class Pairs:
    """A tensor (X, 2 * A, ...) of X experts is stored as (X, ..., 2 * A), with its two halves interleaved.

    Index 2 * i in the file is index i of the first half, and index 2 * i + 1 is index i of the second half.
    """

    native: str
    stored: str


Rule = Rename | Rows | Groups | Stack | Pairs


@dataclass(frozen=True)
class Weights:
    """The format of a family's tensors in files.

    - `rules`: by which tensors are renamed and reshaped; the first match applies.
    - `prefixes`: (native, stored) beginnings of full names, replaced after `rules`; the first match applies.
    - `base`: prefix of names that is missing in files of the model without its head, as saved by `AutoModel`.
    - `ignored`: name endings of tensors in files that are not part of the model.
    - `passthrough`: name prefixes of the passthrough tensors, which are not trained but copied into exports.
    """

    rules: tuple[Rule, ...] = ()
    prefixes: tuple[tuple[str, str], ...] = ()
    base: str = ""
    ignored: tuple[str, ...] = (".rotary_emb.inv_freq",)
    passthrough: tuple[str, ...] = ()


# Files with the native names and shapes.
PLAIN = Weights()
QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
# Files with a tensor for each matrix of each expert.
EXPERTS = Weights(
    (
        Stack("mlp.experts.gate_up_proj", ("mlp.experts.{}.gate_proj.weight", "mlp.experts.{}.up_proj.weight")),
        Stack("mlp.experts.down_proj", ("mlp.experts.{}.down_proj.weight",)),
    )
)
