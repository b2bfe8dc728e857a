"""Under which names the files of a Hugging Face folder hold a model's tensors, as rules that read both ways.

Most tensors lie in a file as the ledger has them. Experts' matrices, which are one tensor for all experts of a layer
here and in the memory of transformers 5, are one tensor each in files, whichever version wrote them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kumi.spec.model import ModelSpec
from kumi.spec.op import Param


@dataclass(frozen=True)
class Rename:
    """A tensor whose name ends in `ending` here, and in `stored` in files."""

    ending: str
    stored: str


@dataclass(frozen=True)
class Stack:
    """A tensor (X, N * A, B) whose name ends in `ending`, in files N matrices (A, B) for each of X, named `pieces` with
    the number of the expert in place of {}."""

    ending: str
    pieces: tuple[str, ...]


Rule = Rename | Stack

_EXPERTS: tuple[Rule, ...] = (
    Stack("mlp.experts.gate_up_proj", ("mlp.experts.{}.gate_proj.weight", "mlp.experts.{}.up_proj.weight")),
    Stack("mlp.experts.down_proj", ("mlp.experts.{}.down_proj.weight",)),
)
_MIXTRAL: tuple[Rule, ...] = (
    Rename("mlp.gate.weight", "block_sparse_moe.gate.weight"),
    Stack(
        "mlp.experts.gate_up_proj", ("block_sparse_moe.experts.{}.w1.weight", "block_sparse_moe.experts.{}.w3.weight")
    ),
    Stack("mlp.experts.down_proj", ("block_sparse_moe.experts.{}.w2.weight",)),
)
# The first rule whose ending fits counts; where none does, names are the same.
RULES: dict[str, tuple[Rule, ...]] = {
    "mixtral": _MIXTRAL, "qwen3_moe": _EXPERTS, "olmoe": _EXPERTS, "deepseek_v2": _EXPERTS, "deepseek_v3": _EXPERTS,
}  # fmt: skip


@dataclass(frozen=True)
class Part:
    """A tensor in a file: the rectangle of a ledger's tensor that begins at `start` and has `extent`. In the file it
    has `shape`, with the same elements in the same order."""

    name: str
    shape: tuple[int, ...]
    start: tuple[int, ...]
    extent: tuple[int, ...]


def whole(param: Param) -> Part:
    """`param` stored as it is."""
    return Part(param.name, param.shape, (0,) * len(param.shape), param.shape)


def parts(spec: ModelSpec, param: Param) -> tuple[Part, ...]:
    """What files hold of `param`, a tensor of `spec`: all of it, in the order of its elements."""
    for rule in RULES.get(spec.family, ()):
        if param.name.endswith(f".{rule.ending}"):
            prefix = param.name.removesuffix(rule.ending)
            if isinstance(rule, Rename):
                return (Part(prefix + rule.stored, param.shape, (0,) * len(param.shape), param.shape),)
            return tuple(_pieces(prefix, rule.pieces, param.shape))
    return (whole(param),)


def _pieces(prefix: str, pieces: Sequence[str], shape: tuple[int, ...]) -> list[Part]:
    count, rows, columns = shape
    height = rows // len(pieces)
    return [
        Part(prefix + piece.format(expert), (height, columns), (expert, index * height, 0), (1, height, columns))
        for expert in range(count)
        for index, piece in enumerate(pieces)
    ]
