"""Faults that users found where dimensions meet, in trainers of all kinds: each has the smallest case that shows it.

A step on many ranks against the same step in one process, in float64. Every case names the wrong implementation that
it catches; test_model_layouts catches others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from test_layouts import close

from kumi.nn.attention.attention_context import segments
from kumi.nn.attention.grouped_query import attend
from kumi.nn.linear import Linear
from kumi.nn.router import routers, rows_per_expert
from kumi.parallel import (
    all_reduce_max,
    all_reduce_sum,
    build,
    clip_gradients,
    expert_parallel,
    grad_sync,
    token_collectives,
)
from kumi.parallel.ring_attention import ring_attention_fn
from kumi.parallel.stage_modules import stages_of
from kumi.parallel.tensor_parallel import ShardedProjections
from kumi.parallel.ulysses import ulysses_attention_fn
from kumi.parallel.vocab_parallel import VocabularyShard
from kumi.spec.layout import Layout
from kumi.spec.model import ModelSpec
from kumi.spec.precision import PRECISIONS
from ranks import run_ranks
from steps import LENGTH, SEQUENCES, SPECS, Part, forward_backward, gradients, mesh_of

BOUND = 0.1  # of the norm, which is larger: gradients are clipped


def _one_key_head(spec: ModelSpec) -> ModelSpec:
    layers = (replace(layer, attention=replace(layer.attention, num_key_value_heads=1)) for layer in spec.layers)
    return replace(spec, layers=tuple(layers))


MODELS = SPECS | {"one key head": _one_key_head(SPECS["qwen"])}


@dataclass(frozen=True)
class Seen:
    """The loss, the norm, and this rank's part of the gradients before and after clipping, of one step."""

    loss: float
    norm: float
    grads: list[Part]
    clipped: list[Part]


def step(
    layout: Layout,
    family: str,
    microbatches: int = 1,
    kind: str = "fp64",
    scale: float = 1.0,
    aux: float = 0.0,
    change: Callable[[torch.nn.Module], None] | None = None,
) -> Seen:
    """Run forward, backward and clipping of MODELS[family], with the loss multiplied by `scale`."""
    mesh, precision = mesh_of(layout), PRECISIONS[kind]
    model = build(MODELS[family], mesh, precision, weights=7)
    if change is not None:
        change(model)
    for _, router in routers(model):
        router.balance.weight = aux * scale / (SEQUENCES * LENGTH)
    dtype = getattr(torch, precision.param)
    loss = forward_backward(model, mesh, 0, microbatches, dtype=dtype, scale=scale)
    clip_gradients(model, None, mesh, loss_scale=scale)
    grads = gradients(model, mesh)
    norm = clip_gradients(model, BOUND, mesh).item()
    return Seen(loss, norm, grads, gradients(model, mesh))


@cache
def alone(family: str, *how: Any) -> Seen:
    """Return the results of one process."""
    return run_ranks(1, step, Layout(), family, *how)[0]


def differing(ranks, layout, family, *how, of=""):
    """Check loss, norm and clipped gradients, and return the gradients with `of` in their names that differ."""
    expected = alone(family, 1, *how[1:])
    assert expected.norm > BOUND
    seen = ranks(layout.world_size, step, layout, family, *how)
    by_name, clipped = ({part.name: part for part in parts} for parts in (expected.grads, expected.clipped))
    named = [part for one in seen for part in one.grads if of in part.name]
    assert named, f"no gradient is named {of}"
    different = [part.name for part in named if not close(part, by_name[part.name])]
    if not different:
        assert [one.loss for one in seen] == pytest.approx([expected.loss] * len(seen), rel=1e-10)
        assert [one.norm for one in seen] == pytest.approx([expected.norm] * len(seen), rel=1e-10)
        assert [part.name for one in seen for part in one.clipped if not close(part, clipped[part.name])] == []
    return different


# Each rank has the gradient of its own tokens (between the regions) or heads (q_norm and k_norm): one that does not add
# them up trains with a part of the gradient, and the ranks' copies drift apart.
@pytest.mark.parametrize(
    ("layout", "family"),
    [
        (Layout(tp=2), "llama"),
        (Layout(tp=4), "qwen"),
        (Layout(tp=2, sequence_parallel=False), "qwen"),
        (Layout(tp=2), "latent"),
    ],
)
def test_gradients_of_norms_under_tensor_and_sequence_parallelism(ranks, layout, family):
    assert differing(ranks, layout, family, of="norm") == []


# Catches a norm that counts replicated tensors once for every rank that has them (norms over tp, a key head that two tp
# ranks copy, replicas), or counts sharded tensors on one rank only.
@pytest.mark.parametrize(
    "layout",
    [Layout(tp=2, dp_shard=2, zero=1), Layout(tp=2, dp_replicate=2), Layout(tp=2, dp_replicate=2, dp_shard=2, zero=3)],
)
def test_clip_norm_of_sharded_and_replicated_parameters(ranks, layout):
    assert differing(ranks, layout, "one key head") == []


# A router sees a rank's own tokens, as norms do; and how busy experts are must be counted over all ranks that share a
# microbatch, because the loss multiplies two sums over its tokens, and ranks' losses do not add up to it.
@pytest.mark.parametrize("family", ["moe", "latent"])  # counted in the microbatch, and in each sequence
@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(tp=2, ep=2), Layout(tp=4, ep=2, expert_tp=2)])
def test_router_and_auxiliary_loss_under_tensor_and_sequence_parallelism(ranks, layout, family):
    assert differing(ranks, layout, family, 1, "fp64", 1.0, 50.0, of="gate.weight") == []
    assert alone(family, 1, "fp64", 1.0, 50.0).norm != pytest.approx(alone(family, 1, "fp64", 1.0).norm, rel=1e-3)


# Catches a loss that is a mean over each rank's own tokens, gradients that are averaged over cp or summed over it
# twice, and a loss scale that is divided out once too often.
@pytest.mark.parametrize("layout", [Layout(cp=2), Layout(cp=2, context="ulysses"), Layout(cp=2, zero=3)])
def test_loss_scale_under_context_parallelism(ranks, layout):
    scale = 1024.0
    assert differing(ranks, layout, "qwen", 1, "fp64", scale) == []
    expected = alone("qwen", 1, "fp16", scale)
    for seen in ranks(2, step, layout, "qwen", 1, "fp16", scale):
        assert seen.loss == pytest.approx(expected.loss, rel=1e-3)
        assert seen.norm == pytest.approx(expected.norm, rel=1e-2)
    assert expected.norm == pytest.approx(alone("qwen", 1, "fp64", scale).norm, rel=1e-2)


# Experts have copies on other ranks than the rest: one count of copies for all, or none, is wrong for one of the two.
@pytest.mark.parametrize(
    "layout",
    [
        Layout(tp=2, ep=2),
        Layout(tp=2, expert_tp=2),
        Layout(dp_shard=2, tp=2, ep=2, zero=1),
        Layout(tp=4, ep=2),  # copies of experts on two tp ranks, which have no copies of other matrices
    ],
)
def test_gradient_norm_under_expert_and_tensor_parallelism(ranks, layout):
    assert differing(ranks, layout, "moe") == []


# Catches sinks that are not sharded with the heads, so that every rank takes those of the first heads.
@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(tp=4), Layout(tp=2, cp=2, context="ulysses")])
def test_attention_sinks_under_tensor_parallelism(ranks, layout):
    assert differing(ranks, layout, "sinks", of="sinks") == []


# Both ends of the pipeline have a gradient of the one table: the sum of the two, counted once in the norm, whatever is
# between them, and wherever virtual stages put them (apart, or both on the first rank, which must not add them twice).
@pytest.mark.parametrize(
    "layout", [Layout(pp=4), Layout(pp=2, schedule="interleaved", stages=2), Layout(pp=4, schedule="zb-v", stages=2)]
)
def test_tied_embeddings_with_many_and_virtual_stages(ranks, layout):
    assert differing(ranks, layout, "deep-tied", 4, of="embed_tokens") == []


# Documents of 3, 6 and 7 tokens in rows that are cut every 4 or 2: catches positions that restart with a chunk,
# ends of documents that only one chunk has, and later stages that have none.
@pytest.mark.parametrize(
    "layout", [Layout(cp=2), Layout(cp=2, context="ulysses"), Layout(cp=4), Layout(pp=2), Layout(cp=2, pp=2)]
)
def test_packed_documents_under_context_and_pipeline_parallelism(ranks, layout):
    assert differing(ranks, layout, "deep", 2) == []


# Catches warm-ups that wait for microbatches that never come, and gradients summed with "the last" microbatch of a full
# pipeline only.
@pytest.mark.parametrize(
    ("layout", "microbatches"),
    [
        (Layout(pp=4), 1),
        (Layout(pp=4), 3),
        (Layout(pp=4, schedule="gpipe"), 2),
        (Layout(pp=4, schedule="zb-h1"), 2),
        (Layout(pp=4, schedule="zb-v", stages=2), 1),
        (Layout(pp=2, dp_shard=2, zero=1), 1),
        (Layout(pp=2, dp_replicate=2, schedule="zb-h1"), 1),
    ],
)
def test_fewer_microbatches_than_stages(ranks, layout, microbatches):
    assert differing(ranks, layout, "deep", microbatches) == []


def _laid(shape: tuple[int, ...], how: str, seed: int) -> torch.Tensor:
    """Return a tensor that is not contiguous: transposed, or one row expanded."""
    random = torch.Generator().manual_seed(10 * seed + dist.get_rank())
    if how == "expanded":
        return torch.randn(1, *shape[1:], generator=random, dtype=torch.float64).expand(shape)
    whole = torch.randn(*reversed(shape), generator=random, dtype=torch.float64)
    return whole.permute(*reversed(range(len(shape))))


def _changed(function: Callable[..., Any], *args: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the result of `function` for a tensor, or the tensor that it changed in place."""

    def run(x: torch.Tensor) -> torch.Tensor:
        result = function(x, *args)
        return x if result is None else result

    return run


def _ones(bias: bool) -> Linear:
    layer = Linear(6, 5, bias=bias, device=None, dtype=torch.float64)
    for parameter in layer.parameters():
        torch.nn.init.ones_(parameter)
    return layer


def _column_linear(x: torch.Tensor) -> torch.Tensor:
    return torch.stack(ShardedProjections(dist.group.WORLD, True, False).column_linear(x, [_ones(True), _ones(True)]))


def _row_linear(x: torch.Tensor, selective: bool) -> torch.Tensor:
    return ShardedProjections(dist.group.WORLD, True, selective).row_linear(x, _ones(False))


def _dispatch(x: torch.Tensor) -> torch.Tensor:
    scores = torch.arange(8.0).sin().view(4, 2)
    ids = (scores > 0).long() + torch.tensor([0, 2])
    exchange = expert_parallel.ExpertExchange(dist.group.WORLD, None)
    routing = expert_parallel.Routing(ids, scores.double(), rows_per_expert(ids, 4))
    rows, _, back = exchange.dispatch(x, routing)
    return exchange.combine(rows, routing, back)


def _functions() -> dict[str, tuple[tuple[int, ...], Callable[[torch.Tensor], torch.Tensor]]]:
    """Return every communicating function, with the shape of its argument on each of two ranks."""
    group, mesh = dist.group.WORLD, mesh_of(Layout(cp=2))
    ring, whole = ring_attention_fn([0, 3, 8, 16], group), segments(torch.zeros(2, 8), None)
    ulysses = ulysses_attention_fn(lambda *given: attend(whole, *given), group)
    projections, vocabulary = ShardedProjections(group, True, False), VocabularyShard(group, 10, True)
    rows: dict[str, Any] = {
        name: lambda x, name=name: getattr(token_collectives, name)(x, group)
        for name in (
            "all_gather_no_grad",
            "reduce_scatter_no_grad",
            "all_reduce_no_grad",
            "all_gather",
            "reduce_scatter",
            "all_reduce",
            "copy_to_group",
        )
    }
    rows |= {
        "over all ranks": _changed(all_reduce_sum, mesh),
        "largest": _changed(all_reduce_max, mesh),
        "gradients": _changed(lambda x: grad_sync.all_reduce_grads([x], group)),
        "rows of experts": lambda x: (
            expert_parallel.exchange_rows(x, [1, 3], [1 + 2 * dist.get_rank()] * 2, group)
            if dist.get_rank() == 0
            else expert_parallel.exchange_rows(x, [1, 3], [3, 3], group)
        ),
        "counts of experts": lambda x: expert_parallel.EXCHANGE_COUNTS(x, group.group_name),
        "experts": _dispatch,
        "column-parallel linear": _column_linear,
        "row-parallel linear": lambda x: _row_linear(x, False),
        "saved row-parallel linear": lambda x: _row_linear(x, True),
        "broadcast": lambda x: projections.broadcast(x),
        "the head's input": vocabulary.gather,
        "the head's gradient": vocabulary.reduce,
        "logits": lambda x: vocabulary.logits(x, torch.ones(5, 6, dtype=torch.float64)),
    }
    heads: dict[str, Any] = {
        "ring": lambda x: ring(x, x[:, :, :2], x[:, :, 1:3], None),
        "ulysses": lambda x: ulysses(x, x[:, :, :2], x[:, :, 1:3], None),
    }
    return {name: ((4, 6), function) for name, function in rows.items()} | {
        name: ((2, 4, 4, 6), function) for name, function in heads.items()
    }


FUNCTIONS = (
    "all_gather_no_grad",
    "reduce_scatter_no_grad",
    "all_reduce_no_grad",
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "copy_to_group",
    "over all ranks",
    "largest",
    "gradients",
    "rows of experts",
    "counts of experts",
    "experts",
    "column-parallel linear",
    "row-parallel linear",
    "saved row-parallel linear",
    "broadcast",
    "the head's input",
    "the head's gradient",
    "logits",
    "ring",
    "ulysses",
)
WITHOUT_GRADIENT = {
    "all_gather_no_grad",
    "reduce_scatter_no_grad",
    "all_reduce_no_grad",
    "over all ranks",
    "largest",
    "gradients",
    "counts of experts",
    "the head's input",
    "the head's gradient",
    "logits",
}


def _lie_in_order(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_lie_in_order, value))
    if isinstance(value, dist.P2POp):
        return value.tensor.is_contiguous()
    return not isinstance(value, torch.Tensor) or value.is_contiguous()


@contextmanager
def strictly() -> Iterator[None]:
    """Collectives send contiguous tensors, as NCCL requires: gloo copies some views, and misreads others."""

    def checked(send: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            assert _lie_in_order([*args, *kwargs.values()]), f"{send.__name__} was given a view"
            return send(*args, **kwargs)

        return run

    names = (
        "all_reduce",
        "all_to_all_single",
        "batch_isend_irecv",
        "all_gather_into_tensor",
        "reduce_scatter_tensor",
        "all_gather_single",
        "reduce_scatter_single",
    )
    with patch.multiple(dist, **{name: checked(getattr(dist, name)) for name in names if hasattr(dist, name)}):
        yield


def given(name: str, how: str) -> float:
    """Return the largest error of result and gradient of the function `name`, compared with contiguous tensors."""
    with strictly():
        return _difference(name, how)


def _difference(name: str, how: str) -> float:
    shape, function = _functions()[name]
    results = []
    for order in (lambda x: x, lambda x: x.contiguous()):
        x = order(_laid(shape, how, 1)).requires_grad_(name not in WITHOUT_GRADIENT)
        out = function(x)
        values = [out.detach()]
        if out.requires_grad:
            # A gradient with the strides of the input, as far as possible.
            values += torch.autograd.grad(out, x, order(_laid(tuple(out.shape), how, 2)))
        results.append(values)
    return max(float((mine - wanted).abs().max()) for mine, wanted in zip(*results, strict=True))


# No gradient that is written to has one element in many places.
LAID = [
    (name, how) for name in FUNCTIONS for how in ("transposed", "expanded") if (name, how) != ("gradients", "expanded")
]


# Backends send memory as it lies, or refuse: a function that hands them a view sends other elements, or too few.
@pytest.mark.parametrize(("name", "how"), LAID)
def test_tensors_that_are_not_contiguous_enter_a_collective(ranks, name, how):
    assert max(ranks(2, given, name, how)) < 1e-12


def _turned(model: torch.nn.Module) -> None:
    """Have every stage return its hidden states, and take their gradients, with other strides."""
    for stage in stages_of(model).values():
        stage.register_forward_hook(
            lambda module, _, out: out if isinstance(out, tuple) else out.transpose(0, 1).contiguous().transpose(0, 1)
        )


@pytest.mark.parametrize("layout", [Layout(pp=2), Layout(pp=2, tp=2)])
def test_tensors_that_are_not_contiguous_enter_a_pipeline(ranks, layout):
    assert differing(ranks, layout, "deep", 3, "fp64", 1.0, 0.0, _turned) == []
