"""SGD with momentum over this rank's shards of the parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kumi.parallel.optim.optimizer import (
    TrainedParams,
    count_change,
    drop_grads,
    local_grad,
    make_param_groups,
    zero_states,
)
from kumi.parallel.stage_modules import local_shard
from kumi.spec.optim import Optim
from kumi.spec.optim_states import MOMENTUM


@dataclass(frozen=True)
class SGD:
    """Parameters in groups, and the momentum of every parameter; no states if the momentum `betas[0]` is 0.

    The fused kernel is that of torch.optim.SGD. Weight decay is added to the gradient, so it enters the momentum. There
    is neither dampening nor Nesterov momentum.
    """

    optim: Optim
    param_groups: list[dict[str, Any]]
    state: dict[Tensor, dict[str, Tensor]]

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter that has a gradient."""
        momentum = self.optim.betas[0]
        for group in self.param_groups:
            trained = [parameter for parameter in group["params"] if parameter.grad is not None]
            buffers = [self.state[parameter][MOMENTUM] for parameter in trained] if momentum else []
            if not trained:
                continue
            shards = [local_shard(parameter) for parameter in trained]
            torch._fused_sgd_(
                shards,
                [local_grad(parameter) for parameter in trained],
                buffers,
                weight_decay=group["weight_decay"],
                momentum=momentum,
                lr=group["lr"],
                dampening=0.0,
                nesterov=False,
                maximize=False,
                is_first_step=False,  # zero buffers give the first step's momentum: the gradient
            )
            count_change(shards)

    def zero_grad(self) -> None:
        """Free the gradients."""
        drop_grads(self.param_groups)


def build_sgd(trained: TrainedParams) -> SGD:
    """Return SGD over `trained`, with its states zero."""
    groups = make_param_groups([(parameter, param.decayed) for param, parameter in trained.parameters], trained.optim)
    states: dict[Tensor, dict[str, Tensor]] = {
        parameter: zero_states(param, parameter, trained.optim, trained.mesh) for param, parameter in trained.parameters
    }
    return SGD(trained.optim, groups, states)
