"""What tensor-parallel ranks send each other around the matrices of a layer: read off the ledger, as the trainer's own
regions are (`kumi.parallel.tensor_parallel`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from kumi.spec.op import Op
from kumi.spec.sharding import AXIS, style


@dataclass(frozen=True)
class Regions:
    """Elements a token of every message of a layer going forward: what regions take in for matrices cut by columns
    (`enter`), what they read without one (`share`), and what matrices cut by rows give back (`leave`); how many norms
    there are whose mean is taken over ranks (`norms`); and whether the layer ends with one of these (`ends`).

    With sequence parallelism what enters is gathered, its gradient scattered, and it is gathered once more for the
    gradients of the weights; what leaves is scattered and its gradient gathered. Without, all that leaves is summed
    going forward, and the gradients of all that enters going backward.
    """

    enter: tuple[int, ...]
    share: tuple[int, ...]
    leave: tuple[int, ...]
    norms: int
    ends: bool


def regions(ops: Sequence[Op]) -> Regions:
    """The messages of a layer with these operations; routed experts have their own (`expert_tp`)."""
    dense = [op for op in ops if not op.experts]
    enter: list[int] = []
    before = None
    for op in dense:
        if style(op) == "column" and (before is None or style(before) != "column" or before.source != op.source):
            enter.append(op.source.size)
        before = op
    norms = [op for op in dense if op.kind == "norm" and AXIS.get(op.params[0].dims[0].name) == "tp"]
    leave = tuple(op.target.size for op in dense if style(op) == "row")
    # A norm of what the last matrix gives reads it going backward.
    last = [op for op in ops if op.kind in ("linear", "combine", "norm")][-1]
    return Regions(tuple(enter), tuple(_shared(dense)), leave, len(norms), style(last) == "row")


def _shared(ops: Sequence[Op]) -> list[int]:
    """Of what a projection to a latent gives, the part that the norm after it leaves out goes straight to all heads."""
    return [
        one.target.size - after.source.size
        for one, after in pairwise(ops)
        if one.kind == "linear" and style(one) == "replicated" and after.kind == "norm"
        if one.target.name == after.source.name and one.target.size > after.source.size
    ]
