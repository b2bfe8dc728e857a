"""Costs of attention and of the scan of a Mamba mixer on a rank."""

from __future__ import annotations

import numpy as np

from kumi.plan.layout_batch import Floats
from kumi.plan.time.kernel_times import alignment_efficiency, attention_shares, matmul_seconds, peak_flops
from kumi.plan.time.op_costs import MEMORY_PASSES, LayoutSizes, MicrobatchCost
from kumi.plan.time.scan_costs import BACKWARD_MATMULS, scan_kernels, scan_matmul_seconds, scan_score_seconds
from kumi.spec.ledger import Op

# Speed of fused attention relative to FlashAttention-2.
_FLASH_SPEED = {"flash": 1.0, "flash-1": 0.6, "flash-3": 1.0, "pytorch": 1.0}
# On Hopper, kernels made for earlier processors reach this share of the speed of kernels made for Hopper
# (FlashAttention-3, arXiv:2407.08608, figure 5: 370 against 600 TFLOP/s forward).
_BEFORE_HOPPER = 0.65
# Share of the peak that batched matmuls of scores reach. This share and the next were fitted to vTrain's and
# BLOOM's searches on A100.
_SCORE_MATMULS = 0.42
# Share of that speed where the head size is not a multiple of 8, so that tensor cores cannot read it (BigScience's
# chronicles: training reached 134 TFLOP/s with 64 heads of 216, and 100 with 128 heads of 108).
_UNALIGNED_HEADS = 0.08
# Speed of ring attention, which computes one block of keys at a time and merges the results, relative to fused
# attention over all keys on a GPU. Fitted to NVIDIA's runs with context parallelism on H100 (DGX Cloud benchmarks).
_RING_SPEED = 0.8


def add_attention(sizes: LayoutSizes, cost: MicrobatchCost, op: Op) -> None:
    """Add the cost of an attention `op` to `cost`."""
    seq_len = sizes.job.batch.seq_len
    width = sizes.tokens * (op.source.size + op.target.size) / sizes.tp
    if sizes.engine.attention in _FLASH_SPEED:
        _add_flash(sizes, cost, op, 2.0 * width * op.reach(sizes.job.attention_len))
    else:
        _add_unfused(sizes, cost, op, 2.0 * width * seq_len, sizes.tokens * seq_len * op.heads / sizes.tp)


def _add_flash(sizes: LayoutSizes, cost: MicrobatchCost, op: Op, flops: Floats) -> None:
    """Add fused attention with `flops` in the forward pass.

    The backward pass has 2.5 times as many, because it recomputes the scores.
    """
    speed = np.asarray(peak_flops(sizes.device, sizes.job.precision.compute) * _FLASH_SPEED[sizes.engine.attention])
    if "float8" in sizes.device.dtypes:
        speed = speed * np.where(_has_newest_kernel(sizes, op), 1.0, _BEFORE_HOPPER)
    # A query in a document of N tokens sees (N + 1) / 2 keys on average. With a window, N is the length of the document
    # in which a query would see as many keys.
    tokens = np.asarray(2 * op.reach(sizes.job.attention_len) - 1)
    forward, backward = (speed * share for share in attention_shares(sizes.device, tokens))
    # With heads narrower than 128 a part of each processor's matmul units is idle.
    narrow = min(1.0, max(0.6, (op.source.size / max(1, op.heads) / 128) ** 0.25))
    flops = flops / np.where((sizes.cp > 1) & sizes.gpu, _RING_SPEED, 1.0)
    seconds = flops / (forward * narrow)
    cost.attention += seconds
    cost.core += seconds
    cost.forward += seconds
    cost.backward += 2.5 * flops / (backward * narrow)
    cost.kernels_forward += 1
    cost.kernels_backward += 3


def _has_newest_kernel(sizes: LayoutSizes, op: Op) -> Floats:
    """Return True where attention runs in a kernel that is written for the device, (rows,)."""
    if sizes.engine.attention != "pytorch":
        return np.full(np.shape(sizes.cp), sizes.engine.attention == "flash-3")
    seq_len = sizes.job.batch.seq_len
    whole_rows = sizes.job.attention_len == seq_len and (op.window is None or op.window >= seq_len)
    return np.asarray(whole_rows & (sizes.cp == 1))


def _add_unfused(sizes: LayoutSizes, cost: MicrobatchCost, op: Op, flops: Floats, scores: Floats) -> None:
    """Add attention that materializes `scores`: two batched matmuls forward, four backward, and the softmax.

    `flops` counts both forward matmuls.
    """
    width = op.source.size / op.heads
    length = sizes.job.batch.seq_len
    dtype = sizes.job.precision.compute
    shapes = (
        (length / sizes.cp, np.asarray(width), np.asarray(length)),
        (length / sizes.cp, np.asarray(length), np.asarray(width)),
    )
    # The heads' matmuls run as one batch: the time of a single head's matmuls is the lower bound.
    one_head = np.asarray(sum(matmul_seconds(sizes.device, dtype, *shape) for shape in shapes))
    aligned = float(alignment_efficiency(np.asarray(width))) if width % 8 == 0 else _UNALIGNED_HEADS
    speed = peak_flops(sizes.device, dtype) * _SCORE_MATMULS * aligned
    seconds = np.maximum(one_head, flops / speed)
    cost.attention += seconds
    cost.cheap += seconds
    cost.forward += seconds
    cost.backward += 2 * seconds
    softmax = "fused-softmax" if sizes.engine.attention == "fused-softmax" else "eager"
    before = cost.forward.copy()
    sizes.add_passes(cost, MEMORY_PASSES["softmax"][softmax], scores)
    if sizes.engine.dropout:
        sizes.add_passes(cost, MEMORY_PASSES["dropout"]["eager"], scores)
    cost.attention += cost.forward - before
    cost.kernels_forward += 2
    cost.kernels_backward += 4


def add_scan(sizes: LayoutSizes, cost: MicrobatchCost, op: Op) -> None:
    """Add the cost of a scan `op` to `cost`: the matmuls of its chunks and its memory traffic.

    A fused kernel reads its inputs and writes its outputs; unfused kernels also read and write the scores.
    """
    add_scan_matmuls(sizes, cost, op)
    if sizes.engine.scan_kernels != "eager":
        sizes.add_passes(cost, MEMORY_PASSES["gated_norm"]["fused"], sizes.output_elements(op))
        return
    forward, backward = scan_score_seconds(sizes.job, op, sizes.tokens, sizes.tp)
    kernels_forward, kernels_backward = scan_kernels(sizes.job, op)
    cost.forward += forward
    cost.backward += backward
    cost.kernels_forward += kernels_forward
    cost.kernels_backward += kernels_backward


def add_scan_matmuls(sizes: LayoutSizes, cost: MicrobatchCost, op: Op) -> None:
    """Add the matmuls of a scan or convolution `op` to `cost`."""
    seconds = scan_matmul_seconds(sizes.job, op, sizes.sequences, sizes.tp)
    cost.forward += seconds
    cost.backward += BACKWARD_MATMULS * seconds
