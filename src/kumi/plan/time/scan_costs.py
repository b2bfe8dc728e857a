"""What the recurrence of a Mamba mixer, and the convolution before it, cost on a rank."""

from __future__ import annotations

import numpy as np

from kumi.plan.layout_batch import Floats
from kumi.plan.time.kernel_times import peak_flops, stream_seconds
from kumi.spec.job import Job
from kumi.spec.op import Op

# Of a scan whose kernels are not fused: bytes read or written, forward and backward, for every score (for each head
# those of one chunk), and kernels launched for a whole row and for each chunk, whose state goes into the next.
SCORES, KERNELS, KERNELS_OF_CHUNK = (36, 68), (30, 90), (1, 2)

# Products of a scan's backward, which works out its states again, to one of its forward.
AGAIN = 2.7


def product_seconds(job: Job, op: Op, sequences: Floats, tp: Floats) -> Floats:
    """Seconds of the products of a convolution or a scan over `sequences`, of which a rank has one of `tp` parts: in
    float32 where its speed is known and kernels are not fused."""
    device, length = job.cluster.device, job.batch.seq_len
    alone = job.engine.kernels == "eager" and device.peak_flops("float32")
    dtype = "float32" if alone else job.precision.compute
    flops = sequences * op.forward_flops(length, length) / tp
    return np.asarray(flops / (peak_flops(device, dtype) * device.matmul_share(dtype)))


def score_seconds(job: Job, op: Op, tokens: Floats, tp: Floats) -> tuple[Floats, Floats]:
    """Seconds, forward and backward, in which scores that are not fused go through memory."""
    scores = tokens * op.heads * op.chunk / tp
    forward, backward = (stream_seconds(job.cluster.device, size * scores) for size in SCORES)
    return forward, backward


def kernels(job: Job, op: Op) -> tuple[float, float]:
    """Kernels launched, forward and backward, where they are not fused."""
    chunks = -(-job.batch.seq_len // op.chunk)
    forward, backward = (whole + each * chunks for whole, each in zip(KERNELS, KERNELS_OF_CHUNK, strict=True))
    return forward, backward
