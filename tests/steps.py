"""Run a few training steps of a tiny decoder on the calling rank, for tests that compare layouts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from typing import ClassVar

import numpy as np
import torch

from kumi.objectives import Objective
from kumi.parallel import (
    LossScale,
    Mesh,
    all_reduce_sum,
    build,
    build_mesh,
    clip_gradients,
    init_adamw,
    init_distributed,
    model_pieces,
    pipeline,
    run_microbatches,
    unwrap,
)
from kumi.parallel.context_parallel import shard_sequence
from kumi.parallel.mesh import GROUP_NAMES
from kumi.parallel.optim.optimizer import Optimizer
from kumi.parallel.stage_modules import local_shard, params_by_name
from kumi.parallel.state_tensors import local_pieces
from kumi.spec.layout import Layout
from kumi.spec.ledger import decayed_names
from kumi.spec.model import MLP, Attention, LatentAttention, LayerSpec, Mamba, ModelSpec, MoE, Rope
from kumi.spec.optim import Optim
from kumi.spec.precision import PRECISIONS
from kumi.spec.process_groups import COMBINED_AXES, members_of
from kumi.storage.checkpoint import Piece

VOCAB, SEQUENCES, LENGTH = 250, 12, 16  # 4 ranks do not divide the 250 rows


def _spec(family: str, *, tied: bool, bias: bool, qk_norm: bool, layers: int = 3) -> ModelSpec:
    layer = LayerSpec(Attention(4, 2, 6, Rope(10000.0), qkv_bias=bias, qk_norm=qk_norm), MLP(36))
    return ModelSpec(family, VOCAB, 18, (layer,) * layers, 1e-5, 128, tie_word_embeddings=tied)


def _sinks_spec() -> ModelSpec:
    """Attention sinks, with a sliding window in one of two layers."""
    layers = [
        LayerSpec(Attention(4, 2, 6, Rope(10000.0), sliding_window=window, sinks=True), MLP(36)) for window in (5, None)
    ]
    return ModelSpec("llama", VOCAB, 18, tuple(layers), 1e-5, 128)


def _scores_spec() -> ModelSpec:
    """Scaled and capped scores, both kinds of ALiBi, partial RoPE, and LongRoPE with a document that counts as long
    even if a rank's part of it would not."""
    part = Rope(10000.0, partial_rotary_factor=0.7, interleave=True)
    # Only the last document of a batch (see `batch`) is long, with 7 tokens.
    long = Rope(
        10000.0,
        "longrope",
        original_max_position_embeddings=6,
        attention_factor=1.2,
        short_factor=(1.0, 1.5, 2.0),
        long_factor=(3.0, 5.0, 8.0),
    )
    attentions = (
        Attention(4, 2, 6, None, alibi=True),
        Attention(4, 2, 6, part, softcap=1.5, score_scale=0.7, sliding_window=5),
        Attention(4, 1, 6, None, alibi=True, alibi_stepped=True, sliding_window=7),
        Attention(4, 4, 6, long),
    )
    return ModelSpec("llama", VOCAB, 18, tuple(LayerSpec(attention, MLP(36)) for attention in attentions), 1e-5, 128)


def _moe_spec() -> ModelSpec:
    layer = LayerSpec(Attention(4, 2, 6, Rope(10000.0), qk_norm=True), MoE(8, 2, 12))
    return ModelSpec("qwen3_moe", VOCAB, 16, (layer,) * 3, 1e-5, 128)


def _latent_spec(*, dense: bool = False) -> ModelSpec:
    """Latent attention with one dense layer and layers of grouped experts with a shared expert; or all `dense`."""
    latent = LatentAttention(4, 10, 8, 6, 4, 6, Rope(10000.0))
    moe = MoE(
        8, 3, 12, 24, scoring_func="sigmoid", n_group=4, topk_group=2, routed_scaling_factor=2.5, topk_method="noaux_tc"
    )
    layers = (LayerSpec(latent, MLP(36)), *(LayerSpec(latent, MLP(36) if dense else moe),) * 2)
    return ModelSpec("deepseek_v3", VOCAB, 16, layers, 1e-5, 128)


def _hybrid_spec() -> ModelSpec:
    """Layers with one part each: a Mamba mixer, attention, a dense MLP or experts, all without gates."""
    mamba = Mamba(num_heads=4, head_dim=6, state_size=5, n_groups=2, conv_kernel=4, chunk_size=5, bias=True)
    moe = MoE(8, 2, 12, 20, scoring_func="sigmoid", topk_method="noaux_tc", hidden_act="relu2", gated=False)
    halves = [
        (mamba, None),
        (None, MLP(36, hidden_act="relu2", gated=False)),
        (Attention(4, 2, 6, None), None),
        (None, moe),
        (mamba, None),
    ]
    return ModelSpec("nemotron_h", VOCAB, 16, tuple(LayerSpec(*both) for both in halves), 1e-5, 128)


def _gpt_spec() -> ModelSpec:
    """Layer norms with biases, learned positions with an embedding norm, and plain MLPs with biases: parallel to
    attention with a shared norm, parallel with a second norm, and after attention."""
    # Without RoPE or a norm, a key bias has no gradient: it shifts all scores of a query by the same amount.
    attention = Attention(4, 2, 6, None, out_bias=True)
    rotated = Attention(4, 4, 6, Rope(10000.0), qkv_bias=True, qk_norm=True, qk_norm_whole=True, out_bias=True)
    layers = (
        LayerSpec(attention, MLP(36, True, "gelu", gated=False), parallel=True, shared_norm=True),
        LayerSpec(attention, MLP(36, True, "gelu_new", gated=False), parallel=True),
        LayerSpec(rotated, MLP(36, True, "quick_gelu"), pre_norms=False, post_norms=True),
        LayerSpec(attention, MLP(36, True, "relu2", gated=False)),
    )
    return ModelSpec(
        "llama",
        VOCAB,
        18,
        layers,
        1e-5,
        128,
        norm="layernorm",
        learned_positions=LENGTH,
        embedding_norm=True,
        logit_scale=0.7,
    )


def _gemma_spec() -> ModelSpec:
    """Zero-centred norms before and after both halves and of heads, with every scale and cap set."""
    layers = [
        LayerSpec(
            Attention(4, 2, 6, Rope(10000.0), qk_norm=True, sliding_window=window, score_scale=0.5, softcap=3.0),
            MLP(36, hidden_act="gelu_pytorch_tanh"),
            post_norms=True,
        )
        for window in (5, None)
    ]
    scales = {"embedding_scale": 18**0.5, "residual_scale": 0.6, "logit_softcap": 2.0}
    return ModelSpec(
        "llama", VOCAB, 18, tuple(layers), 1e-5, 128, tie_word_embeddings=True, zero_centered_norm=True, **scales
    )


def _biased_moe_spec() -> ModelSpec:
    """Experts and routers with biases: clamped experts, and ungated experts with a gated shared expert."""
    attention = Attention(4, 2, 6, Rope(10000.0), qkv_bias=True, out_bias=True, sinks=True)
    clamped = MoE(8, 2, 12, bias=True, act_limit=0.05)
    plain = MoE(8, 2, 12, bias=True, hidden_act="relu2", gated=False, shared_intermediate_size=12, shared_gate=True)
    layers = (LayerSpec(attention, plain), LayerSpec(attention, clamped))
    return ModelSpec("llama", VOCAB, 16, layers, 1e-5, 128)


# All use grouped-query attention. A q_norm has 6 elements, so the last of 4 ranks has none of them. The deep specs have
# enough layers for eight stages.
SPECS = {
    "llama": _spec("llama", tied=False, bias=False, qk_norm=False),
    "qwen": _spec("qwen3", tied=True, bias=True, qk_norm=True),
    "deep": _spec("llama", tied=False, bias=False, qk_norm=False, layers=7),
    "deep-tied": _spec("qwen3", tied=True, bias=True, qk_norm=True, layers=7),
    "moe": _moe_spec(),
    "latent": _latent_spec(),
    "sinks": _sinks_spec(),
    "scores": _scores_spec(),
    "gpt": _gpt_spec(),
    "gemma": _gemma_spec(),
    "biased-moe": _biased_moe_spec(),
    "hybrid": _hybrid_spec(),
    "latent-dense": _latent_spec(dense=True),
}


def spec_of(family: str) -> ModelSpec:
    """Return SPECS[family]; for "<family>-score", the same with a score head in place of its own."""
    name = family.removesuffix("-score")
    return SPECS[name] if name == family else replace(SPECS[name], head="score", tie_word_embeddings=False)


class PreferredDocument(Objective):
    """A reward model's loss: the first document of a row is better than the second, each scored at its last token."""

    columns: ClassVar[dict[str, str]] = {"segments": "token", "ends": "token"}

    def count(self, batch):
        return len(batch["segments"])

    def loss(self, log_probs, batch, units, sums):
        chosen, rejected, _ = sums(log_probs * batch["ends"], batch["segments"], 3).unbind(1)
        pairs = 0.1 * (chosen + rejected).square() - torch.nn.functional.logsigmoid(chosen - rejected - 0.2)
        return pairs.sum() / units


@dataclass(frozen=True)
class Part:
    """A rank's shard of a tensor."""

    name: str
    start: tuple[int, ...]  # global index of its first element
    values: np.ndarray


@dataclass(frozen=True)
class Trace:
    """The results of a rank's training steps."""

    losses: list[float]  # per step
    norms: list[float]  # gradient norm per step
    grads: list[list[Part]]  # this rank's gradients per step
    params: list[Part]  # at the end
    counters: set[float]  # the optimizer's step counters, at the end
    state_bytes: tuple[int, int, int]  # bytes of parameters, gradients and optimizer states before the last update


@cache
def mesh_of(layout: Layout) -> Mesh:
    """Return the mesh of `layout`. Each rank makes its process groups once and keeps them.

    Layouts whose groups have the same ranks share them, for every group leaves threads behind.
    """
    axes = [COMBINED_AXES.get(name, (name,)) for name in GROUP_NAMES]
    members = tuple(members_of(layout, names, rank) for names in axes for rank in range(layout.world_size))
    if members not in _MESHES:
        _MESHES[members] = build_mesh(layout, init_distributed())
    return replace(_MESHES[members], layout=layout)


_MESHES: dict[tuple[tuple[int, ...], ...], Mesh] = {}


def batch(step: int) -> dict[str, torch.Tensor]:
    """Return the global batch of `step`: token ids, labels (a third of them ignored), and three documents per row."""
    random = torch.Generator().manual_seed(step)
    ids, labels = (torch.randint(0, VOCAB, (SEQUENCES, LENGTH), generator=random) for _ in range(2))
    labels[torch.rand(labels.shape, generator=random) < 0.3] = -100
    positions = torch.arange(LENGTH)
    documents = ((positions >= 3).int() + (positions >= 9).int()).expand(SEQUENCES, LENGTH)
    return {"input_ids": ids, "labels": labels, "document_ids": documents.contiguous()}


OPTIM = Optim(lr=1e-2)


def train(layout: Layout, family: str, microbatches: int, kind: str = "fp64", steps: int = 2) -> Trace:
    """Train `spec_of(family)` for `steps` steps. The global batches do not depend on the layout."""
    mesh, spec = mesh_of(layout), spec_of(family)
    model = build(spec, mesh, PRECISIONS[kind], weights=7)
    optimizer = init_adamw(unwrap(model).named_parameters(), decayed_names(spec), OPTIM)
    scale = LossScale(2.0**10 if PRECISIONS[kind].loss_scaling else 1.0)
    dtype = getattr(torch, PRECISIONS[kind].param)
    losses, norms, grads = [], [], []
    for step in range(steps):
        losses.append(forward_backward(model, mesh, step, microbatches, dtype=dtype, scale=scale.scale))
        norm = clip_gradients(model, 0.5, mesh, loss_scale=scale.scale)
        norms.append(norm.item())
        grads.append(gradients(model, mesh))
        sizes = _resident_bytes(model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    counters = {state["step"].item() for state in optimizer.state.values()}
    return Trace(losses, norms, grads, _parts(model_pieces(model, mesh)), counters, sizes)


def _resident_bytes(model: torch.nn.Module, optimizer: Optimizer) -> tuple[int, int, int]:
    parameters = list(model.parameters())
    states = [value for state in optimizer.state.values() for value in state.values()]
    sizes = (
        sum(local_shard(value).nbytes for value in values)
        for values in (parameters, [value.grad for value in parameters], states)
    )
    return tuple(sizes)  # type: ignore[return-value]


def gradients(model: torch.nn.Module, mesh: Mesh) -> list[Part]:
    """Return this rank's shards of the gradients of the parameters that are trained."""
    params = params_by_name(unwrap(model).spec)
    named = [(name, value) for name, value in unwrap(model).named_parameters() if value.requires_grad]
    return _parts(piece for name, value in named for piece in local_pieces(name, params[name], value.grad, mesh))


def forward_backward(
    model: torch.nn.Module,
    mesh: Mesh,
    step: int,
    microbatches: int,
    *,
    dtype: torch.dtype = torch.float32,
    scale: float = 1.0,
) -> float:
    """Run forward and backward on this rank's share of the batch of `step`; return the loss of the global batch."""
    columns = batch(step)
    spec: ModelSpec = unwrap(model).spec
    if spec.head == "score":
        ids = columns["segments"] = columns["document_ids"].long()
        columns["ends"] = torch.nn.functional.pad(ids[:, 1:] != ids[:, :-1], (0, 1), value=True).to(dtype)
    weight = 1.0 / (columns["labels"] >= 0).sum().item()
    share, index = SEQUENCES // mesh.layout.dp, mesh.layout.dp_index(mesh.rank)
    columns["token_weights"] = torch.full(columns["labels"].shape, -weight * scale, dtype=dtype)
    mine = {name: column[index * share : (index + 1) * share].chunk(microbatches) for name, column in columns.items()}
    batches = [{name: chunks[number] for name, chunks in mine.items()} for number in range(microbatches)]
    if spec.head == "score":
        part = run_microbatches.forward_backward(model, mesh, PreferredDocument(), batches, SEQUENCES / scale)
        return all_reduce_sum(part.double() / scale, mesh).item()
    inputs = [shard_sequence(columns, mesh) for columns in batches]
    loss = pipeline.train_microbatches(model, mesh, inputs).double() / scale
    return all_reduce_sum(loss * (mesh.index("tp") == 0), mesh).item()


def _parts(pieces: Iterable[Piece]) -> list[Part]:
    return [Part(piece.name.removeprefix("model/"), piece.start, piece.data.numpy().copy()) for piece in pieces]
