"""Costs of the scan of a Mamba mixer, and of the convolution before it, on a rank."""

from __future__ import annotations

import numpy as np

from kumi.plan.layout_batch import Floats
from kumi.plan.time.kernel_times import peak_flops, stream_seconds
from kumi.spec.job import Job
from kumi.spec.op import Op

# Costs of an unfused scan, (forward, backward).
# Bytes of memory traffic per score; a chunk of Q positions has Q x Q scores per head.
_SCORE_BYTES = (36, 68)
# Kernel launches for a microbatch, however many sequences it has.
_SCAN_KERNELS = (30, 90)
# Further kernel launches for each chunk of a sequence, because states pass from chunk to chunk.
_CHUNK_KERNELS = (1, 2)

# FLOPs of a scan's backward pass, which recomputes the states, relative to its forward pass.
BACKWARD_MATMULS = 2.7


def scan_matmul_seconds(job: Job, op: Op, sequences: Floats, tp: Floats) -> Floats:
    """Return the seconds of the matmuls of a convolution or scan over `sequences`, sharded over `tp` ranks.

    Unfused kernels compute in float32, if the device's float32 speed is known.
    """
    device, length = job.cluster.device, job.batch.seq_len
    in_float32 = job.engine.scan_kernels == "eager" and device.peak_flops("float32")
    dtype = "float32" if in_float32 else job.precision.compute
    flops = sequences * op.forward_flops(length, length) / tp
    return np.asarray(flops / (peak_flops(device, dtype) * device.matmul_share(dtype)))


def scan_score_seconds(job: Job, op: Op, tokens: Floats, tp: Floats) -> tuple[Floats, Floats]:
    """Return the (forward, backward) seconds of memory traffic for the scores of an unfused scan."""
    scores = tokens * op.heads * op.chunk / tp
    forward, backward = (stream_seconds(job.cluster.device, size * scores) for size in _SCORE_BYTES)
    return forward, backward


def scan_kernels(job: Job, op: Op) -> tuple[float, float]:
    """Return the (forward, backward) kernel launches of an unfused scan over a microbatch."""
    chunks = -(-job.batch.seq_len // op.chunk)
    launches = zip(_SCAN_KERNELS, _CHUNK_KERNELS, strict=True)
    forward, backward = (fixed + per_chunk * chunks for fixed, per_chunk in launches)
    return forward, backward
