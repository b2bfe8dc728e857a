"""The planner times the ledger's FLOPs, and the ledger's FLOPs are PyTorch's."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from kumi.nn import Decoder
from kumi.plan.estimate import estimate
from kumi.plan.layout_batch import batch_layouts
from kumi.plan.time.layer_costs import cost_table
from kumi.spec import ledger
from kumi.spec.cluster import Device
from kumi.spec.layout import Layout
from kumi.spec.model import MLP, Attention, LatentAttention, LayerSpec, Mamba, ModelSpec, MoE, Rope
from planned import job_of

# One FLOP per second, no launch time and instant memory: seconds are FLOPs.
CLOCK = Device("clock", "cpu", 1 << 40, peak=(("float32", 1.0),), matmul=(("", 1.0),), attention=(1.0, 1.0), launch=0.0)
LENGTH = 48
ROPE = Rope(10000.0)
GROUPED, WINDOW = Attention(4, 2, 128, ROPE), Attention(4, 4, 128, ROPE, sliding_window=16)
LATENT = LatentAttention(4, 40, 56, 96, 32, 128, ROPE)
DENSE, EXPERTS = MLP(96), MoE(8, 2, 48, 64)

MODELS = {
    "dense": (LayerSpec(GROUPED, DENSE),) * 4,
    "window": (LayerSpec(WINDOW, DENSE), LayerSpec(GROUPED, DENSE)) * 2,
    "experts": (LayerSpec(GROUPED, DENSE), *(LayerSpec(GROUPED, EXPERTS),) * 3),
    "latent": (LayerSpec(LATENT, EXPERTS),) * 4,
    # The sequence length is not a multiple of the chunk.
    "hybrid": (
        LayerSpec(Mamba(8, 12, 10, 4, 4, 20), None),
        LayerSpec(None, EXPERTS),
        LayerSpec(GROUPED, None),
        LayerSpec(None, DENSE),
    ),
}


def model_of(name):
    return ModelSpec("llama", 256, 64, MODELS[name], 1e-5, 4096)


def job_on_clock(model, sequences=8):
    return job_of(model, seq_len=LENGTH, sequences=sequences, kind="fp32", device=CLOCK)


def forward_seconds(job, layout):
    """Return a rank's forward seconds for a microbatch of the full model, and the seconds in attention."""
    costs, index = cost_table(job, batch_layouts([layout]))
    _, of_layer = job.model.unique_layers()
    parts = [costs.embedding, costs.head, *(costs.layers[kind] for kind in of_layer)]
    row = int(np.asarray(index)[0])
    return tuple(sum(float(getattr(part, name)[row]) for part in parts) for name in ("forward", "attention"))


def counted(model, tokens):
    """Return the ledger's FLOPs of the forward pass: with full attention, and without the masked part."""
    full = causal = 0.0
    for op in ledger.ops(model):
        flops = op.forward_flops(tokens, LENGTH)
        full += flops
        causal += flops * op.reach(LENGTH) / LENGTH if op.kind == "attention" else flops
    assert full == ledger.forward_flops(model, tokens, LENGTH)
    return full, causal


@pytest.mark.parametrize("microbatch", [1, 4])
@pytest.mark.parametrize("name", MODELS)
def test_one_rank_computes_what_the_ledger_says(name, microbatch):
    model = model_of(name)
    full, causal = counted(model, microbatch * LENGTH)
    forward, attention = forward_seconds(job_on_clock(model), Layout(microbatch=microbatch))
    assert forward == pytest.approx(causal, rel=1e-12)
    assert 0 < attention < forward
    assert causal < full


@pytest.mark.parametrize(
    "layout",
    [
        Layout(tp=2),
        Layout(cp=2),
        Layout(tp=2, cp=2, sequence_parallel=False),
        Layout(dp_shard=4, zero=3, ep=4),
        Layout(dp_shard=2, zero=1, tp=2, ep=4),
        Layout(dp_shard=2, zero=1, tp=2, ep=2, expert_tp=2),
    ],
)
@pytest.mark.parametrize("name", ["dense", "experts", "hybrid"])
def test_ranks_that_share_a_microbatch_compute_it_once_together(name, layout):
    """Routers are the exception: every tensor-parallel rank computes them."""
    if name == "dense" and layout.ep > 1:
        layout = replace(layout, ep=1, expert_tp=1)
    if name == "hybrid":
        layout = replace(layout, cp=1)  # Mamba states need full sequences
    model = model_of(name)
    _, causal = counted(model, LENGTH)
    forward, _ = forward_seconds(job_on_clock(model), layout)
    routers = sum(op.forward_flops(LENGTH, LENGTH) for op in ledger.ops(model) if op.kind == "router")
    assert forward * layout.tp * layout.cp == pytest.approx(causal, abs=(layout.tp - 1) * routers + 1e-6 * causal)


@pytest.mark.parametrize("name", MODELS)
def test_the_ledger_s_operations_are_those_that_run(name):
    model = model_of(name)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        Decoder(model)(torch.zeros((2, LENGTH), dtype=torch.int64))
    assert counter.get_total_flops() == ledger.forward_flops(model, 2 * LENGTH, LENGTH)


def test_a_step_s_model_operations_are_the_ledger_s():
    job = job_on_clock(model_of("dense"))
    result = estimate(job, Layout(dp_replicate=8))
    assert result.model_flops == ledger.train_flops(job.model, job.batch.tokens_per_step, LENGTH)
    assert result.model_flops == 3 * counted(job.model, 8 * LENGTH)[0]
