"""What a step does so that routed experts are equally busy (see `kumi.nn.router`), and what it reports of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kumi.config import ResolvedRun
from kumi.nn.router import Router, routers
from kumi.parallel.mesh import Mesh, total
from kumi.spec.ledger import LAYERS
from kumi.spec.model import ModelSpec, MoE


@dataclass(frozen=True)
class Balanced:
    """Of a step: the auxiliary loss, as it was added to the loss, and the rows of the busiest expert of any layer
    relative to the mean of its layer. Scalars; nothing waits for them."""

    aux_loss: Tensor
    busiest: Tensor


def begin(model: nn.Module, run: ResolvedRun, scale: float) -> None:
    """Set every router of `model` for a step whose loss is multiplied by `scale`."""
    balance = run.balance
    layers = len(routed_layers(run.model))
    for _, router in _numbered(model, run.model):
        router.balance.reset()
        router.balance.per_sequence = balance.per_sequence
        weight = balance.coef / (layers * run.batch.tokens_per_step) if balance.kind == "aux" else 0.0
        router.balance.weight = weight * scale


@torch.no_grad()
def end(model: nn.Module, run: ResolvedRun, mesh: Mesh, scale: float) -> Balanced | None:
    """Move the biases after a step, where that is wanted; what is to be reported, None of a model without experts."""
    layers = routed_layers(run.model)
    if not layers:
        return None
    # A row for each layer with experts, of whatever stage: the choices of all ranks and the auxiliary loss.
    table = torch.zeros(len(layers), _experts(run.model) + 1, dtype=torch.float64, device=mesh.device)
    found = [(layers.index(number), router) for number, router in _numbered(model, run.model)]
    for row, router in found:
        if router.balance.counts is not None:
            table[row, :-1] = router.balance.counts
        if router.balance.loss is not None:
            table[row, -1] = router.balance.loss / scale
    if mesh.index("tp") > 0 and not mesh.layout.sequence_parallel:
        table.zero_()  # these ranks have the same tokens
    table = total(table, mesh)
    counts = table[:, :-1]
    if run.balance.kind == "loss-free":
        for row, router in found:
            router.update_bias(counts[row], run.balance.coef)
    return Balanced(table[:, -1].sum(), (counts.amax(dim=1) / counts.mean(dim=1)).max())


def routed_layers(model: ModelSpec) -> list[int]:
    """The numbers of the layers that have experts."""
    return [number for number, layer in enumerate(model.layers) if isinstance(layer.mlp, MoE)]


def _experts(model: ModelSpec) -> int:
    return max(layer.mlp.num_experts for layer in model.layers if isinstance(layer.mlp, MoE))


def _numbered(model: nn.Module, spec: ModelSpec) -> Iterator[tuple[int, Router]]:
    """The routers of `model`, whatever it is wrapped in, and the numbers of their layers."""
    for name, router in routers(model):
        yield int(name.rpartition(LAYERS)[2].partition(".")[0]), router
