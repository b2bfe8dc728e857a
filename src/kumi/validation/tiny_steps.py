"""Steps of tiny decoders of every kind on one rank of a layout, to compare devices and layouts with each other."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kumi.parallel import Mesh, all_reduce_sum, build, clip_gradients, init_adamw, pipeline, unwrap
from kumi.parallel.context_parallel import shard_sequence
from kumi.spec.comm import DEFAULT_COMM, Comm
from kumi.spec.layout import Layout
from kumi.spec.ledger import decayed_names
from kumi.spec.model import MLP, Attention, LatentAttention, LayerSpec, ModelSpec, MoE, Rope
from kumi.spec.optim import Optim
from kumi.spec.precision import PRECISIONS

# Tokens of the vocabulary; rows of a batch of all ranks, and tokens of a row; steps.
VOCAB, ROWS, LENGTH, STEPS = 256, 8, 64, 3
_ROPE = Rope(10000.0)
_PLAIN = Attention(4, 2, 16, _ROPE, qk_norm=True)
_CAPPED = Attention(
    4, 2, 16, Rope(10000.0, partial_rotary_factor=0.5, interleave=True), softcap=2.0, score_scale=0.4, sliding_window=24
)
_TILTED = Attention(4, 2, 16, None, alibi=True)
_LATENT = LatentAttention(4, 24, 16, 16, 8, 16, _ROPE)


def _model(family: str, *layers: LayerSpec, tied: bool = False) -> ModelSpec:
    return ModelSpec(family, VOCAB, 64, layers, 1e-5, 256, tie_word_embeddings=tied)


MODELS = {
    "dense": _model("qwen3", *[LayerSpec(_PLAIN, MLP(128))] * 4, tied=True),
    "sinks": _model("llama", *[LayerSpec(Attention(4, 2, 16, _ROPE, sinks=True), MLP(128))] * 2),
    "scores": _model("llama", *[LayerSpec(attention, MLP(128)) for attention in (_CAPPED, _TILTED)] * 2),
    "experts": _model("qwen3_moe", *[LayerSpec(_PLAIN, MoE(8, 2, 32))] * 4),
    "latent": _model(
        "deepseek_v3",
        LayerSpec(_LATENT, MLP(128)),
        LayerSpec(_LATENT, MoE(8, 2, 32, 64, scoring_func="sigmoid", n_group=4, topk_group=2, topk_method="noaux_tc")),
    ),
}


@dataclass(frozen=True)
class TinyCase:
    """A model, its layout and precision, and the number of microbatches of a rank.

    `documents`: each row has three documents instead of one.
    """

    layout: Layout
    model: str = "dense"
    precision: str = "fp32"
    microbatches: int = 2
    documents: bool = True
    comm: Comm = DEFAULT_COMM


def tiny_steps(case: TinyCase, mesh: Mesh) -> list[tuple[float, float]]:
    """Return loss and gradient norm of every step."""
    precision = PRECISIONS[case.precision]
    model = build(MODELS[case.model], mesh, precision, weights=7, comm=case.comm)
    optimizer = init_adamw(unwrap(model).named_parameters(), decayed_names(MODELS[case.model]), Optim(lr=1e-2))
    results = []
    for step in range(STEPS):
        loss = pipeline.train_microbatches(model, mesh, _inputs(case, mesh, step))
        norm = clip_gradients(model, 0.5, mesh)
        optimizer.step()
        optimizer.zero_grad()
        results.append((all_reduce_sum(loss * (mesh.index("tp") == 0), mesh).item(), norm.item()))
    return results


def _inputs(case: TinyCase, mesh: Mesh, step: int) -> list[dict[str, torch.Tensor]]:
    """Return this rank's microbatches of the batch of `step`, which is the same batch in every layout."""
    random = torch.Generator().manual_seed(step)
    ids, labels = (torch.randint(0, VOCAB, (ROWS, LENGTH), generator=random) for _ in range(2))
    labels[torch.rand(labels.shape, generator=random) < 0.3] = -100
    weights = torch.full(labels.shape, -1.0 / int((labels >= 0).sum()))
    whole = {"input_ids": ids, "labels": labels, "token_weights": weights}
    if case.documents:
        place = torch.arange(LENGTH)
        whole["document_ids"] = ((place >= 10).int() + (place >= 37).int()).repeat(ROWS, 1)
    share, index = ROWS // mesh.layout.dp, mesh.layout.dp_index(mesh.rank)
    mine = {
        name: value[index * share : (index + 1) * share].to(mesh.device).chunk(case.microbatches)
        for name, value in whole.items()
    }
    return [shard_sequence({name: parts[i] for name, parts in mine.items()}, mesh) for i in range(case.microbatches)]
