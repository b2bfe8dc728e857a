"""What attention sends to the other ranks of a context-parallel group.

Ring: a rank's keys and values go round, cp - 1 times on, and in the backward pass again, with their gradients, which
kumi adds up in float32 or wider. Ulysses: an all-to-all brings every rank the queries, keys and values of some heads,
another takes the results back, and in the backward pass their gradients go the other way.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kumi.spec.job import Job
from kumi.spec.op import Dim, Op
from kumi.spec.sharding import cut


def kv_dims(op: Op) -> tuple[Dim, Dim]:
    """The dims of the keys and of the values of an attention operation, of one token."""
    _, keys, values, *_ = op.saved
    return keys.dims[0], values.dims[0]


def kv_elements(op: Op, tp: Any) -> Any:
    """Elements of a token's keys and values on a tensor-parallel rank; degrees are whole numbers or arrays of them."""
    return sum(cut(dim, tp) for dim in kv_dims(op))


def dealt_elements(op: Op, tp: Any, cp: Any) -> tuple[Any, Any]:
    """Elements of a token that Ulysses sends out of a rank: of its queries, keys and values, and of its results. A key
    head goes to as many ranks as share its queries."""
    kv = sum(cut(dim, tp) * np.maximum(1, cp // -(-dim.count // tp)) for dim in kv_dims(op))
    return cut(op.source, tp) + kv, cut(op.target, tp)


def gradient_itemsize(job: Job) -> int:
    """Bytes of an element of the gradients that follow keys and values round."""
    return max(4, job.itemsize) if job.engine.wide_ring else job.itemsize
