"""Adapters are trained in every layout as in one process: loss, gradient norm, gradients, and adapters after two
steps; no other tensor is trained."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from test_layouts import TOLERANCE, close

from kumi.nn import initialize
from kumi.parallel import build, clip_gradients, init_adamw, model_pieces, unwrap
from kumi.parallel.lora import begin_dropout_step
from kumi.parallel.stage_modules import params_by_name
from kumi.parallel.state_tensors import local_pieces, optimizer_pieces
from kumi.spec.layout import Layout
from kumi.spec.ledger import decayed_names, trained_names
from kumi.spec.lora import Lora
from kumi.spec.optim import Optim
from kumi.spec.precision import PRECISIONS
from steps import SPECS, Part, forward_backward, mesh_of

SOME = Lora(r=3, alpha=5.0, targets=("q_proj", "v_proj", "down_proj"))
LORAS = {
    "lora": SOME,
    "dora": replace(SOME, targets=("all-linear",), use_dora=True, use_rslora=True),
    "drop": replace(SOME, targets=("q_proj", "v_proj", "up_proj"), dropout=0.3),
    # Column-parallel matrices have no adapter here, and the model's first matrix has none.
    "rows": replace(SOME, targets=("o_proj", "up_proj")),
    "experts": replace(SOME, targets=("q_proj", "experts")),
    "down": replace(SOME, targets=("experts.down_proj",)),
    "full": replace(SOME, modules=("embed_tokens", "lm_head", "norm", "input_layernorm", "q_norm")),
    "packed": replace(SOME, use_dora=True, quantize="nf4"),
}


@dataclass(frozen=True)
class Trace:
    losses: list[float]
    norms: list[float]
    grads: list[Part]
    params: list[Part]
    trained: set[str]
    trainable: frozenset[str]


def _read(spec, name, start, shape):
    """Adapters that are not zero, so that the first gradients of all are not."""
    param = replace(params_by_name(spec)[name.removeprefix("model/")], init="normal 0.1")
    out = torch.empty(shape)
    initialize.fill(out, param, start, std=1.0, seed=11)
    return out


def train(layout: Layout, family: str, lora: str, microbatches: int, kind: str = "fp64") -> Trace:
    mesh = mesh_of(layout)
    spec = replace(SPECS[family], lora=LORAS[lora])
    adapters = lambda name, start, shape: _read(spec, name, start, shape)  # noqa: E731
    model = build(spec, mesh, PRECISIONS[kind], weights=7, adapters=adapters)
    by_name, named = params_by_name(spec), list(unwrap(model).named_parameters())
    optimizer = init_adamw(named, decayed_names(spec), Optim(lr=1e-2))
    losses, norms = [], []
    dtype = getattr(torch, PRECISIONS[kind].param)
    for step in range(2):
        begin_dropout_step(unwrap(model), 5, step)
        losses.append(forward_backward(model, mesh, step, microbatches, dtype=dtype))
        norms.append(clip_gradients(model, 0.5, mesh).item())
        grads = [
            piece
            for name, value in named
            if value.grad is not None
            for piece in local_pieces(name, by_name[name], value.grad, mesh)
        ]
        grads = [Part(one.name, one.start, one.data.numpy().copy()) for one in grads]
        optimizer.step()
        optimizer.zero_grad()
    params = [
        Part(one.name.removeprefix("model/"), one.start, one.data.double().numpy().copy())
        for one in model_pieces(model, mesh)
    ]
    states = {one.name for one in optimizer_pieces(unwrap(model), optimizer, mesh)}
    return Trace(losses, norms, grads, params, states, trained_names(spec))


@cache
def alone(run, family: str, lora: str) -> Trace:
    return run(1, train, Layout(), family, lora, 1)[0]


def equal(trace: Trace, expected: Trace) -> None:
    assert trace.losses == pytest.approx(expected.losses, rel=TOLERANCE)
    assert trace.norms == pytest.approx(expected.norms, rel=TOLERANCE)
    for mine, whole in ((trace.grads, expected.grads), (trace.params, expected.params)):
        by_name = {part.name: part for part in whole}
        assert [part.name for part in mine if not close(part, by_name[part.name])] == []
    assert {part.name for part in trace.grads} <= trace.trainable
    assert trace.grads


TP, SP = Layout(tp=2, sequence_parallel=False), Layout(tp=2)
CASES = [
    (Layout(dp_replicate=2), "llama", "lora"),
    (TP, "qwen", "lora"),
    (replace(SP, recompute="selective"), "llama", "rows"),
    (replace(SP, recompute="full"), "latent", "dora"),
    (replace(TP, recompute="selective"), "llama", "dora"),
    (Layout(pp=2), "qwen", "lora"),
    (Layout(cp=2), "llama", "lora"),
    (Layout(dp_shard=2, tp=2, zero=3), "llama", "dora"),
    (Layout(dp_shard=2, tp=2, ep=2, zero=1), "moe", "dora"),
    (Layout(tp=2, pp=2, schedule="zb-h1"), "llama", "dora"),
    (Layout(dp_shard=2, zero=3, ep=2), "moe", "experts"),
    (Layout(tp=2, expert_tp=2, recompute="selective"), "moe", "experts"),
    (Layout(pp=2, dp_shard=2, zero=1, ep=2), "hybrid", "experts"),
    (replace(SP, recompute="full"), "qwen", "full"),
    (Layout(pp=2), "qwen", "full"),
]
# Others above cover these.
LATER = [
    (SP, "qwen", "dora"),
    (Layout(dp_shard=2, zero=3, recompute="full"), "llama", "dora"),
    *(
        (layout, "moe", "experts")
        for layout in (
            Layout(dp_replicate=2),
            Layout(pp=2, schedule="zb-h1"),
            Layout(cp=2, ep=2),
            Layout(dp_replicate=2, dp_shard=2, zero=3, ep=2),
            Layout(tp=4, ep=2, expert_tp=2),
            Layout(dp_shard=2, zero=1, expert_tp=2),
            Layout(dp_shard=4, zero=2, ep=2, recompute="full"),
        )
    ),
    (Layout(dp_shard=2, tp=2, pp=2, zero=1, ep=2, expert_tp=2), "biased-moe", "experts"),
    (Layout(tp=2, expert_tp=2), "hybrid", "down"),
    (Layout(tp=4, ep=2), "latent", "experts"),
    (Layout(dp_shard=2, zero=3), "qwen", "full"),
    (Layout(dp_shard=2, zero=1, pp=2), "llama", "full"),
    (Layout(dp_replicate=2, cp=2), "llama", "full"),
    (TP, "gemma", "full"),
    (SP, "gpt", "full"),
    (Layout(tp=2, pp=2, schedule="zb-v", stages=2), "deep-tied", "full"),
]


def _name(case) -> str:
    layout, family, lora = case
    changed = [f"{key}{value}" for key, value in vars(layout).items() if value != getattr(Layout(), key)]
    return "-".join([*changed, family, lora])


@pytest.mark.parametrize(
    "case", [*CASES, *(pytest.param(case, marks=pytest.mark.exhaustive) for case in LATER)], ids=_name
)
def test_layout_equals_one_process(ranks, case):
    layout, family, lora = case
    expected = alone(ranks, family, lora)
    for trace in ranks(layout.world_size, train, layout, family, lora, 2 if layout.pp == 1 else 3):
        equal(trace, expected)


@pytest.mark.parametrize(
    "layout", [Layout(recompute="full"), Layout(recompute="selective"), TP], ids=["full", "selective", "tp"]
)
def test_the_same_is_dropped_when_recomputed_and_by_ranks_with_the_same_input(ranks, layout):
    expected = alone(ranks, "llama", "drop")
    assert expected.losses[0] != alone(ranks, "llama", "lora").losses[0]
    for trace in ranks(layout.world_size, train, layout, "llama", "drop", 1):
        equal(trace, expected)


def test_half_precision_follows_float32(ranks):
    expected = ranks(1, train, Layout(), "llama", "dora", 1, "fp32")[0]
    for trace in ranks(2, train, Layout(dp_shard=2, zero=3), "llama", "dora", 3, "bf16"):
        assert trace.losses == pytest.approx(expected.losses, rel=5e-3)
        assert trace.norms == pytest.approx(expected.norms, rel=5e-2)


def test_a_first_stage_without_adapters_is_refused(ranks):
    layout = Layout(pp=2, stage_layers=(0, 3))
    with pytest.raises(AssertionError, match="none with an adapter"):
        ranks(2, train, layout, "llama", "lora", 6)
