"""What the forward pass really holds for the backward pass, against the ledger's activations."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from kumi.parallel import build, build_mesh
from kumi.parallel.mesh import Place
from kumi.plan.activations import ledger
from kumi.plan.columns import columns
from kumi.plan.memory import rank_memory
from kumi.spec.cluster import Device
from kumi.spec.layout import Layout
from kumi.spec.model import MLP, Attention, LayerSpec, ModelSpec, Rope
from kumi.spec.precision import PRECISIONS
from planned import job_of

LAYER = LayerSpec(Attention(4, 2, 32, Rope(10000.0)), MLP(320))
MODEL = ModelSpec("llama", 512, 128, (LAYER,) * 4, 1e-5, 256)
ROWS, LENGTH = 4, 128


def held_after_forward(recompute, kind):
    """Bytes allocated and not freed again in the forward pass."""
    mesh = build_mesh(Layout(recompute=recompute, microbatch=ROWS), Place(0, 1, 0, torch.device("cpu")))
    model = build(MODEL, mesh, PRECISIONS[kind], weights=0)
    input_ids = torch.randint(0, MODEL.vocab_size, (ROWS, LENGTH))
    weights = torch.ones((ROWS, LENGTH))
    # One cycle has nothing to accumulate, but without `acc_events` PyTorch before 2.13 warns that it does not.
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as record:
        kept = model(input_ids, labels=input_ids, token_weights=weights)
    assert kept[0].requires_grad
    return sum(event.self_cpu_memory_usage for event in record.key_averages())


def said_kept(recompute, kind):
    """Bytes a token that the planner's ledger says the model keeps."""
    kept = ledger(job_of(MODEL, kind=kind), columns([Layout()]))
    return float(len(MODEL.layers) * getattr(kept.layers[0], recompute)[0] + kept.embedding[0] + kept.head[0])


@pytest.mark.parametrize("kind", ["fp32", "bf16"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_what_the_forward_keeps(recompute, kind):
    layout = Layout(recompute=recompute, microbatch=ROWS)
    tokens = ROWS * LENGTH
    job = job_of(MODEL, seq_len=LENGTH, sequences=ROWS, kind=kind, device=Device("", "cpu", 0))
    estimate = rank_memory(job, layout)
    copies = estimate.weights if recompute == "none" else 0  # else they live in the backward only
    head_gradient = 4 * MODEL.vocab_size * MODEL.hidden_size
    said = said_kept(recompute, kind) * tokens + copies + head_gradient
    # Above by the log-sum-exp of attention, which GPU kernels keep and the CPU's does not.
    assert said * 0.97 <= held_after_forward(recompute, kind) <= said
