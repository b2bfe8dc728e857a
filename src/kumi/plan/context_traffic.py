"""Sizes of the tensors that context-parallel attention communicates.

Ring attention sends each rank's keys and values around the ring in cp - 1 hops. The backward pass repeats this and
sends their gradients along, which kumi accumulates in float32 or wider. Ulysses redistributes queries, keys and values
from sequence shards to head shards with an all-to-all, and the attention output back with another; the backward pass
sends the gradients in the opposite directions.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kumi.spec.job import Job
from kumi.spec.op import Dim, Op
from kumi.spec.sharding import shard_size


def _kv_dims(op: Op) -> tuple[Dim, Dim]:
    """Return the dims of one token's keys and values in the attention operation `op`."""
    _, keys, values, *_ = op.saved
    return keys.dims[0], values.dims[0]


def kv_elements(op: Op, tp: Any) -> Any:
    """Return the elements of one token's keys and values on a tensor-parallel rank. `tp` is an int or an array."""
    return sum(shard_size(dim, tp) for dim in _kv_dims(op))


def ulysses_elements(op: Op, tp: Any, cp: Any) -> tuple[Any, Any]:
    """Return the elements per token that a rank sends in the two all-to-alls of Ulysses: (q, k and v; output).

    Where key-value heads are fewer than cp ranks, each is replicated to all ranks that hold some of its queries.
    """
    kv = sum(shard_size(dim, tp) * np.maximum(1, cp // -(-dim.count // tp)) for dim in _kv_dims(op))
    return shard_size(op.source, tp) + kv, shard_size(op.target, tp)


def kv_grad_itemsize(job: Job) -> int:
    """Return the bytes per element of the key and value gradients that ring attention sends."""
    return max(4, job.itemsize) if job.engine.wide_ring else job.itemsize
