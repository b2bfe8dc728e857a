"""What the axes of a layout must divide in a model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from kumi.spec.ledger import kind_ops
from kumi.spec.model import ModelSpec
from kumi.spec.op import Op
from kumi.spec.sharding import AXIS


@dataclass(frozen=True)
class Cuts:
    """What an axis must divide: of every layer that it cuts, how many pieces there are to hand out.

    `tensor`: query heads, groups of a Mamba mixer's heads, and widths of feed-forward layers, `kv_heads`: key-value
    heads; `width`: of routed experts, `experts`: how many of those. `whole_rows`: a layer needs all of a sequence.
    """

    tensor: tuple[tuple[str, int], ...]
    kv_heads: tuple[int, ...]
    width: tuple[int, ...]
    experts: tuple[int, ...]
    whole_rows: bool

    def tp_divides_kv_heads(self, tp: int) -> bool:
        """Whether every rank has equally many key-value heads, or equally many ranks every head."""
        return all(count % tp == 0 or tp % count == 0 for count in self.kv_heads)

    @property
    def heads(self) -> tuple[int, ...]:
        """Query heads of every layer that has other ones."""
        return tuple(count for name, count in self.tensor if name == "num_attention_heads")

    def deals_heads(self, cp: Any, tp: Any) -> Any:
        """Whether each of `cp` ranks can get as many of a tp rank's heads, and the keys and values of these; degrees
        are whole numbers, or numpy arrays of them."""
        divides = cp > 0
        for count in self.heads:
            divides = divides & (count // tp % cp == 0)
        for count in self.kv_heads:
            per_rank = -(-count // tp)
            divides = divides & ((per_rank % cp == 0) | (cp % per_rank == 0))
        return divides


@lru_cache(maxsize=64)
def cuts(model: ModelSpec) -> Cuts:
    """What the axes must divide in `model`."""
    ops = [op for kind in kind_ops(model) for op in kind]
    names = {"heads": "num_attention_heads", "groups": "n_groups", "ffn": "intermediate_size"}
    dense = {(dim, count) for op in ops if not op.experts for dim, count in _cut_by_tp(op)}
    return Cuts(
        tuple(sorted((names.get(dim, dim), count) for dim, count in dense if dim != "kv_heads")),
        tuple(sorted(count for dim, count in dense if dim == "kv_heads")),
        tuple(sorted({count for op in ops if op.experts for _, count in _cut_by_tp(op)})),
        tuple(sorted({op.experts for op in ops if op.experts})),
        any(op.kind == "scan" for op in ops),
    )


def _cut_by_tp(op: Op) -> Iterator[tuple[str, int]]:
    return ((dim.name, dim.count) for dim in (op.source, op.target) if AXIS.get(dim.name) == "tp")
