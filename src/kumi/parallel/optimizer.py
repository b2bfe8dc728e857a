"""The optimizer over this rank's part of the parameters."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from kumi.parallel.grads import local
from kumi.spec.optim import COUNTER, MOMENTS, Optim


class Optimizer(Protocol):
    """Parameters in groups, each with its own settings, and the states of every trained one, wherever these are."""

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...

    @property
    def state(self) -> dict[Tensor, dict[str, Tensor]]: ...

    def step(self) -> None:
        """One update of every parameter that has a gradient."""

    def zero_grad(self) -> None:
        """Drops the gradients and their memory."""


@torch.no_grad()
def forget_gradients(model: nn.Module, optimizer: Optimizer) -> None:
    """Drops the gradients of a step. Those of whole replicas lie in the buckets that they travel in: they are set to
    zero there, for the next step's would otherwise lie beside these until its last microbatch."""
    if not isinstance(model, DistributedDataParallel):
        optimizer.zero_grad()
        return
    gradients = [value.grad for value in model.parameters() if value.grad is not None]
    torch._foreach_zero_(gradients)


@dataclass(frozen=True)
class AdamW:
    """Parameters in groups, each with its own settings, and the states of every trained parameter.

    The same fused kernel and the same names as in torch.optim.AdamW, whose making and first step would import torch's
    compiler: a second of CPU time in every rank.
    """

    param_groups: list[dict[str, Any]]
    state: dict[Tensor, dict[str, Tensor]]

    @torch.no_grad()
    def step(self) -> None:
        """One update of every parameter that has a gradient."""
        for group in self.param_groups:
            trained = [parameter for parameter in group["params"] if parameter.grad is not None]
            states = [self.state[parameter] for parameter in trained]
            means, squares = ([local(state[name]) for state in states] for name in MOMENTS)
            steps = [state[COUNTER] for state in states]
            if not trained:
                continue
            torch._foreach_add_(steps, 1)
            gradients = [local(parameter.grad) for parameter in trained]
            update(group, [local(parameter) for parameter in trained], gradients, means, squares, steps)

    def zero_grad(self) -> None:
        """Drops the gradients and their memory."""
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None


def update(
    group: dict[str, Any],
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    means: Sequence[Tensor],
    squares: Sequence[Tensor],
    steps: Sequence[Tensor],
) -> None:
    """AdamW's update of `parameters`, in place, with the settings of `group`; `steps` count this one already."""
    torch._fused_adamw_(
        list(parameters),
        list(gradients),
        list(means),
        list(squares),
        [],
        list(steps),
        lr=group["lr"],
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        amsgrad=False,
        maximize=False,
    )


def init_adamw(
    named_parameters: Iterable[tuple[str, nn.Parameter]], decayed: Container[str], optim: Optim, *, states: bool = True
) -> AdamW:
    """AdamW over `named_parameters`, plain or sharded, with its states allocated and zero.

    Weight decay applies to the parameters whose names are in `decayed` (of a model: `kumi.spec.ledger.decayed`). States
    exist from the start so that a checkpoint before the first step is complete and memory does not grow during it;
    without `states` there are none. The learning rate is the caller's to set.
    """
    named = [(name, parameter) for name, parameter in named_parameters if parameter.requires_grad]
    trained = [parameter for _, parameter in named]
    common = {"lr": optim.lr, "betas": optim.betas, "eps": optim.eps}
    groups = [
        {"params": [p for name, p in named if name in decayed], "weight_decay": optim.weight_decay, **common},
        {"params": [p for name, p in named if name not in decayed], "weight_decay": 0.0, **common},
    ]
    made: dict[Tensor, dict[str, Tensor]] = {parameter: _state(parameter) for parameter in trained} if states else {}
    return AdamW([group for group in groups if group["params"]], made)


def _state(parameter: nn.Parameter) -> dict[str, Tensor]:
    return {
        COUNTER: torch.zeros((), dtype=torch.float32, device=parameter.device),
        **{name: torch.zeros_like(parameter, requires_grad=False) for name in MOMENTS},
    }
