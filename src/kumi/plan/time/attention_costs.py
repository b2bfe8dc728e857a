"""What attention and the scan of a Mamba mixer cost a rank."""

from __future__ import annotations

import numpy as np

from kumi.plan.layout_batch import Floats
from kumi.plan.time.kernel_times import alignment, matmul_seconds, peak_flops
from kumi.plan.time.op_costs import PASSES, Cost, Rows
from kumi.plan.time.scan_costs import AGAIN, kernels, product_seconds, score_seconds
from kumi.spec.ledger import Op

# Speed of fused attention relative to its second version; kernels made for processors before Hopper reach this share of
# what kernels made for it do (FlashAttention-3, arXiv:2407.08608, figure 5: 370 against 600 TFLOP/s forward).
FLASH = {"flash": 1.0, "flash-1": 0.6, "flash-3": 1.0}
BEFORE_HOPPER = 0.65
# Share of the peak that batched products of scores reach; and that which they reach where a head's width is no multiple
# of 8, so that tensor cores cannot read it (BigScience's chronicles: 134 TFLOP/s with 64 heads of 216, 100 with 128
# heads of 108). Both fitted to vTrain's and BLOOM's searches on A100.
ODD_HEADS = 0.08
SCORES = 0.42
# Speed of fused attention over a part of the keys at a time on a GPU, whose results are merged, relative to one over
# all of them. Fitted to NVIDIA's runs with context parallelism on H100 (DGX Cloud benchmarks).
RING = 0.8


def attention(rows: Rows, cost: Cost, op: Op) -> None:
    seq_len = rows.job.batch.seq_len
    each = rows.tokens * (op.source.size + op.target.size) / rows.tp
    if rows.engine.attention in FLASH:
        _flash(rows, cost, op, 2.0 * each * op.reach(seq_len))
    else:
        _scores(rows, cost, op, 2.0 * each * seq_len, rows.tokens * seq_len * op.heads / rows.tp)


def _flash(rows: Rows, cost: Cost, op: Op, flops: Floats) -> None:
    """Fused attention does 2.5 times the forward's products in its backward, scores computed again."""
    speed = peak_flops(rows.device, rows.job.precision.compute) * FLASH[rows.engine.attention]
    if "float8" in rows.device.dtypes and rows.engine.attention != "flash-3":
        speed *= BEFORE_HOPPER
    forward, backward = (speed * share for share in rows.device.attention)
    # A head narrower than 128 leaves part of each processor's products idle.
    narrow = min(1.0, max(0.6, (op.source.size / max(1, op.heads) / 128) ** 0.25))
    flops = flops / np.where((rows.cp > 1) & rows.gpu, RING, 1.0)
    seconds = flops / (forward * narrow)
    cost.attention += seconds
    cost.core += seconds
    cost.forward += seconds
    cost.backward += 2.5 * flops / (backward * narrow)
    cost.kernels_forward += 1
    cost.kernels_backward += 3


def _scores(rows: Rows, cost: Cost, op: Op, flops: Floats, scores: Floats) -> None:
    """Attention that writes the scores: four batched products of half the FLOPs each way, and the softmax."""
    width = op.source.size / op.heads
    length = rows.job.batch.seq_len
    dtype = rows.job.precision.compute
    shapes = (
        (length / rows.cp, np.asarray(width), np.asarray(length)),
        (length / rows.cp, np.asarray(length), np.asarray(width)),
    )
    # Products of one head are dealt out together with those of the others: a head alone is the least it can take.
    alone = np.asarray(sum(matmul_seconds(rows.device, dtype, *shape) for shape in shapes))
    aligned = float(alignment(np.asarray(width))) if width % 8 == 0 else ODD_HEADS
    speed = peak_flops(rows.device, dtype) * SCORES * aligned
    one = np.maximum(alone, flops / speed)
    cost.attention += one
    cost.cheap += one
    cost.forward += one
    cost.backward += 2 * one
    kind = "fused-softmax" if rows.engine.attention == "fused-softmax" else "eager"
    before = cost.forward.copy()
    rows.passes(cost, PASSES["softmax"][kind], scores)
    if rows.engine.dropout:
        rows.passes(cost, PASSES["dropout"]["eager"], scores)
    cost.attention += cost.forward - before
    cost.kernels_forward += 2
    cost.kernels_backward += 4


def scan(rows: Rows, cost: Cost, op: Op) -> None:
    """Products of chunks; besides, a fused kernel reads what goes in and writes what comes out, others scores."""
    products(rows, cost, op)
    if rows.engine.kernels != "eager":
        rows.passes(cost, PASSES["gated_norm"]["fused"], rows.elements_of(op))
        return
    forward, backward = score_seconds(rows.job, op, rows.tokens, rows.tp)
    kernels_forward, kernels_backward = kernels(rows.job, op)
    cost.forward += forward
    cost.backward += backward
    cost.kernels_forward += kernels_forward
    cost.kernels_backward += kernels_backward


def products(rows: Rows, cost: Cost, op: Op) -> None:
    seconds = product_seconds(rows.job, op, rows.sequences, rows.tp)
    cost.forward += seconds
    cost.backward += AGAIN * seconds
