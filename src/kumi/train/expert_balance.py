"""Load balancing of routed experts in a training step (see `kumi.nn.router`), and the metrics of the balance."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kumi.config import ResolvedRun
from kumi.nn.router import Router, routers
from kumi.parallel.mesh import Mesh, all_reduce_sum
from kumi.spec.ledger import LAYERS
from kumi.spec.model import ModelSpec, MoE


@dataclass(frozen=True)
class ExpertBalance:
    """Scalars of one step, left on the device, so that the host does not wait for them."""

    aux_loss: Tensor  # auxiliary loss, as it is added to the loss
    busiest: Tensor  # largest ratio of an expert's tokens to the mean of its layer


def prepare_routers(model: nn.Module, run: ResolvedRun, scale: float) -> None:
    """Prepare every router of `model` for a step whose loss is multiplied by `scale`."""
    balance = run.balance
    layers = len(moe_layers(run.model))
    for _, router in _layer_routers(model, run.model):
        router.balance.reset()
        router.balance.per_sequence = balance.per_sequence
        weight = balance.coef / (layers * run.batch.tokens_per_step) if balance.kind == "aux" else 0.0
        router.balance.weight = weight * scale


@torch.no_grad()
def balance_experts(model: nn.Module, run: ResolvedRun, mesh: Mesh, scale: float) -> ExpertBalance | None:
    """Sum the expert counts over all ranks and, for loss-free balancing, update the routers' biases.

    Return the metrics; None for a model without experts.
    """
    layers = moe_layers(run.model)
    if not layers:
        return None
    # One row per layer with experts, of all pipeline stages: tokens per expert, then the auxiliary loss.
    table = torch.zeros(len(layers), _max_experts(run.model) + 1, dtype=torch.float64, device=mesh.device)
    local_rows = [(layers.index(layer), router) for layer, router in _layer_routers(model, run.model)]
    for row, router in local_rows:
        if router.balance.counts is not None:
            table[row, :-1] = router.balance.counts
        if router.balance.loss is not None:
            table[row, -1] = router.balance.loss / scale
    if mesh.index("tp") > 0 and not mesh.layout.sequence_parallel:
        table.zero_()  # without sequence parallelism, all tp ranks count the same tokens
    table = all_reduce_sum(table, mesh)
    counts = table[:, :-1]
    if run.balance.kind == "loss-free":
        for row, router in local_rows:
            router.update_bias(counts[row], run.balance.coef)
    return ExpertBalance(table[:, -1].sum(), (counts.amax(dim=1) / counts.mean(dim=1)).max())


def moe_layers(model: ModelSpec) -> list[int]:
    """Return the indices of the layers that have experts."""
    return [index for index, layer in enumerate(model.layers) if isinstance(layer.mlp, MoE)]


def _max_experts(model: ModelSpec) -> int:
    """Return the number of experts of the layer that has the most."""
    return max(layer.mlp.num_experts for layer in model.layers if isinstance(layer.mlp, MoE))


def _layer_routers(model: nn.Module, spec: ModelSpec) -> Iterator[tuple[int, Router]]:
    """Yield the layer index and the router of every layer with experts in `model`, which may be wrapped."""
    for name, router in routers(model):
        yield int(name.rpartition(LAYERS)[2].partition(".")[0]), router
