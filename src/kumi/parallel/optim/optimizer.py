"""The interface of every optimizer, and the functions that they share: parameter groups, states, gradients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from kumi.parallel.mesh import Mesh
from kumi.parallel.stage_modules import local_shard, params_by_name, unwrap
from kumi.spec.op import Param
from kumi.spec.optim import Optim
from kumi.spec.optim_states import OptimizerState, states_of
from kumi.spec.sharding import local_shape


class Optimizer(Protocol):
    """Parameters in groups, each with its own settings, and the states of every trained parameter, on any device."""

    @property
    def optim(self) -> Optim:
        """The optimizer's kind and settings; `kumi.spec.optim_states` names its states."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Groups as in torch.optim: the list "params" of parameters, and their settings by name."""

    @property
    def state(self) -> Mapping[Tensor, dict[str, Tensor]]:
        """The states of each parameter by name."""

    def step(self) -> None:
        """Update every parameter that has a gradient."""

    def zero_grad(self) -> None:
        """Free the gradients."""


def count_change(parameters: Sequence[Tensor]) -> None:
    """Count a change of `parameters` in place (`Tensor._version`), as PyTorch's fused optimizer kernels do not.

    `kumi.parallel.weight_copies` reads the count.
    """
    torch.autograd.graph.increment_version(list(parameters))


@dataclass(frozen=True)
class TrainedParams:
    """The input of an optimizer.

    `parameters`: every trained parameter of this rank with its description, in the model's order.
    `folder`: where states are if the layout keeps them on drives.
    """

    parameters: tuple[tuple[Param, nn.Parameter], ...]
    optim: Optim
    mesh: Mesh
    folder: Path | None = None


def trained_parameters(model: nn.Module, optim: Optim, mesh: Mesh, folder: Path | None = None) -> TrainedParams:
    """Return the trained parameters of `model`, a result of `build`."""
    decoder = unwrap(model)
    params = params_by_name(decoder.spec)
    named = ((params[name], value) for name, value in decoder.named_parameters() if value.requires_grad)
    return TrainedParams(tuple(named), optim, mesh, folder)


def make_param_groups(parameters: Iterable[tuple[nn.Parameter, bool]], optim: Optim) -> list[dict[str, Any]]:
    """Return groups of `parameters` with their settings: first those with weight decay (True), then the others.

    The caller sets the learning rate before every step.
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


def zero_states(param: Param, parameter: nn.Parameter, optim: Optim, mesh: Mesh) -> dict[str, Tensor]:
    """Return this rank's shard of every state of `parameter`: zeros, as plain tensors on the parameter's device.

    States exist from the start so that a checkpoint before the first step is complete and that step needs no more
    memory.
    """
    part = local_shard(parameter)
    return {state.name: _zeros(state, part, mesh) for state in states_of(optim, param)}


def _zeros(state: OptimizerState, part: Tensor, mesh: Mesh) -> Tensor:
    """Return this rank's shard of `state`, zeros, on the device of the parameter's shard `part`."""
    dtype: torch.dtype = getattr(torch, state.dtype) if state.dtype else part.dtype
    shape = local_shape(state.tensor, mesh.layout, mesh.rank, sharded=state.sharded)
    return torch.zeros(shape, dtype=dtype, device=part.device)


def local_grad(parameter: Tensor) -> Tensor:
    """Return this rank's shard of the gradient of `parameter`, which must have one."""
    assert parameter.grad is not None
    return local_shard(parameter.grad)


def drop_grads(groups: Sequence[dict[str, Any]]) -> None:
    """Free the gradients of all parameters in `groups`."""
    for group in groups:
        for parameter in group["params"]:
            parameter.grad = None


@torch.no_grad()
def clear_grads(model: nn.Module, optimizer: Optimizer) -> None:
    """Clear the gradients of a step.

    DDP's gradients are views of its buckets: they are set to zero. Otherwise the next step would allocate gradients in
    addition to the buckets until its last microbatch.
    """
    if not isinstance(model, DistributedDataParallel):
        optimizer.zero_grad()
        return
    gradients = [value.grad for value in model.parameters() if value.grad is not None]
    torch._foreach_zero_(gradients)
