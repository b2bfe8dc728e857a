"""The counts of heads, columns and experts in a model that the degrees of a layout must divide."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import isqrt
from typing import Any

from kumi.spec.ledger import unique_layer_ops
from kumi.spec.model import ModelSpec
from kumi.spec.op import Op
from kumi.spec.sharding import DIM_TO_AXIS


@dataclass(frozen=True)
class Divisibility:
    """The distinct counts over all layers that degrees must divide.

    - `tensor`: (config key, count) pairs for tp: query heads, head groups of Mamba mixers, feed-forward widths.
    - `kv_heads`: key-value heads, for tp; see `tp_divides_kv_heads`.
    - `width`: intermediate sizes of a routed expert, for expert_tp.
    - `experts`: numbers of routed experts, for ep.
    - `needs_full_sequence`: a layer cannot work on a part of a sequence, so cp must be 1.
    """

    tensor: tuple[tuple[str, int], ...]
    kv_heads: tuple[int, ...]
    width: tuple[int, ...]
    experts: tuple[int, ...]
    needs_full_sequence: bool

    def tp_divides_kv_heads(self, tp: int) -> bool:
        """True if each rank has the same number of key-value heads, or each head is on the same number of ranks."""
        return all(count % tp == 0 or tp % count == 0 for count in self.kv_heads)

    @property
    def heads(self) -> tuple[int, ...]:
        """The distinct numbers of query heads."""
        return tuple(count for name, count in self.tensor if name == "num_attention_heads")

    def divides_heads(self, cp: Any, tp: Any) -> Any:
        """True if the heads of a tp rank, with their keys and values, divide evenly over `cp` ranks (Ulysses).

        The degrees are ints, or arrays of ints.
        """
        divides = cp > 0
        for count in self.heads:
            divides = divides & (count // tp % cp == 0)
        for count in self.kv_heads:
            per_rank = -(-count // tp)
            divides = divides & ((per_rank % cp == 0) | (cp % per_rank == 0))
        return divides


@lru_cache(maxsize=64)
def divisibility(model: ModelSpec) -> Divisibility:
    """Return the counts that the degrees of a layout for `model` must divide."""
    ops = [op for kind in unique_layer_ops(model) for op in kind]
    names = {"heads": "num_attention_heads", "groups": "n_groups", "ffn": "intermediate_size"}
    dense = {(dim, count) for op in ops if not op.experts for dim, count in _tp_dims(op)}
    return Divisibility(
        tuple(sorted((names.get(dim, dim), count) for dim, count in dense if dim != "kv_heads")),
        tuple(sorted(count for dim, count in dense if dim == "kv_heads")),
        tuple(sorted({count for op in ops if op.experts for _, count in _tp_dims(op)})),
        tuple(sorted({op.experts for op in ops if op.experts})),
        any(op.kind == "scan" for op in ops),
    )


def _tp_dims(op: Op) -> Iterator[tuple[str, int]]:
    """Return, for each dim of `op` that tp shards, the name and the number of parts (heads, columns) to distribute."""
    return ((dim.name, dim.count) for dim in (op.source, op.target) if DIM_TO_AXIS.get(dim.name) == "tp")


def divisors(number: int) -> list[int]:
    """Return the divisors of `number` in ascending order."""
    small = [value for value in range(1, isqrt(number) + 1) if number % value == 0]
    return small + [number // value for value in reversed(small) if value * value != number]
