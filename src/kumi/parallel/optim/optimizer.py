"""What every optimizer is built from and offers: parameters in groups, named states, an update."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from kumi.parallel.grad_norm import by_name, local
from kumi.parallel.mesh import Mesh
from kumi.spec.op import Param
from kumi.spec.optim import Optim
from kumi.spec.optim_states import OptimizerState, states_of
from kumi.spec.sharding import local_shape


class Optimizer(Protocol):
    """Parameters in groups, each with its own settings, and the states of every trained one, wherever these are."""

    @property
    def optim(self) -> Optim:
        """Which optimizer this is; its states are those of `kumi.spec.optim_states`."""

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...

    @property
    def state(self) -> Mapping[Tensor, dict[str, Tensor]]: ...

    def step(self) -> None:
        """One update of every parameter that has a gradient."""

    def zero_grad(self) -> None:
        """Drops the gradients and their memory."""


@dataclass(frozen=True)
class Trained:
    """What an optimizer is built from: every trained parameter of this rank with its description, in the model's order.

    `folder` is where states on drives go.
    """

    parameters: tuple[tuple[Param, nn.Parameter], ...]
    optim: Optim
    mesh: Mesh
    folder: Path | None = None


def trained_parameters(model: nn.Module, optim: Optim, mesh: Mesh, folder: Path | None = None) -> Trained:
    """Return what is trained of `model`, which `build` returned."""
    decoder = model.module if isinstance(model, DistributedDataParallel) else model
    params = by_name(decoder.spec)
    named = ((params[name], value) for name, value in decoder.named_parameters() if value.requires_grad)
    return Trained(tuple(named), optim, mesh, folder)


def groups_of(parameters: Iterable[tuple[nn.Parameter, bool]], optim: Optim) -> list[dict[str, Any]]:
    """Return `parameters` as groups with their settings: those that weight decay applies to (True), then the others.

    The learning rate is the caller's to set before every step.
    """
    common, listed = {"lr": optim.lr, "betas": optim.betas, "eps": optim.eps}, list(parameters)
    groups = [
        {
            "params": [parameter for parameter, is_decayed in listed if is_decayed],
            "weight_decay": optim.weight_decay,
            **common,
        },
        {"params": [parameter for parameter, is_decayed in listed if not is_decayed], "weight_decay": 0.0, **common},
    ]
    return [group for group in groups if group["params"]]


def new_states(param: Param, parameter: nn.Parameter, optim: Optim, mesh: Mesh) -> dict[str, Tensor]:
    """Return this rank's part of every state of `parameter`, plain tensors of zeros beside it.

    States exist from the start so that a checkpoint before the first step is complete and memory does not grow in it.
    """
    part = local(parameter)
    return {state.name: _zeros(state, part, mesh) for state in states_of(optim, param)}


def _zeros(state: OptimizerState, part: Tensor, mesh: Mesh) -> Tensor:
    dtype: torch.dtype = getattr(torch, state.dtype) if state.dtype else part.dtype
    shape = local_shape(state.tensor, mesh.layout, mesh.rank, sharded=state.sharded)
    return torch.zeros(shape, dtype=dtype, device=part.device)


def gradient_of(parameter: Tensor) -> Tensor:
    """Return this rank's part of the gradient of `parameter`, which has one."""
    assert parameter.grad is not None
    return local(parameter.grad)


def drop_gradients(groups: Sequence[dict[str, Any]]) -> None:
    """Drop the gradients of all parameters in `groups`, and their memory."""
    for group in groups:
        for parameter in group["params"]:
            parameter.grad = None


@torch.no_grad()
def forget_gradients(model: nn.Module, optimizer: Optimizer) -> None:
    """Drops the gradients of a step. Those of whole replicas lie in the buckets that they travel in: they are set to
    zero there, for the next step's would otherwise lie beside these until its last microbatch."""
    if not isinstance(model, DistributedDataParallel):
        optimizer.zero_grad()
        return
    gradients = [value.grad for value in model.parameters() if value.grad is not None]
    torch._foreach_zero_(gradients)
