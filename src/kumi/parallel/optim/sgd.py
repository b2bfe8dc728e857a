"""SGD with momentum over this rank's part of the parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kumi.parallel.grad_norm import local
from kumi.parallel.optim.optimizer import Trained, drop_gradients, gradient_of, groups_of, new_states
from kumi.spec.optim import Optim
from kumi.spec.optim_states import MOMENTUM


@dataclass(frozen=True)
class SGD:
    """Parameters in groups, and the momentum of every parameter; no states where the momentum `betas[0]` is 0.

    The arithmetic of torch.optim.SGD, by the same fused kernel: weight decay is added to the gradient, so that the
    momentum has it, too. There is neither dampening nor Nesterov's momentum.
    """

    optim: Optim
    param_groups: list[dict[str, Any]]
    state: dict[Tensor, dict[str, Tensor]]

    @torch.no_grad()
    def step(self) -> None:
        """One update of every parameter that has a gradient."""
        momentum = self.optim.betas[0]
        for group in self.param_groups:
            trained = [parameter for parameter in group["params"] if parameter.grad is not None]
            buffers = [self.state[parameter][MOMENTUM] for parameter in trained] if momentum else []
            if not trained:
                continue
            torch._fused_sgd_(
                [local(parameter) for parameter in trained],
                [gradient_of(parameter) for parameter in trained],
                buffers,
                weight_decay=group["weight_decay"],
                momentum=momentum,
                lr=group["lr"],
                dampening=0.0,
                nesterov=False,
                maximize=False,
                is_first_step=False,  # buffers of zeros give the first step's momentum, its gradient
            )

    def zero_grad(self) -> None:
        """Drops the gradients and their memory."""
        drop_gradients(self.param_groups)


def build_sgd(trained: Trained) -> SGD:
    """Return SGD over `trained`, with its states zero."""
    groups = groups_of([(parameter, param.decayed) for param, parameter in trained.parameters], trained.optim)
    states: dict[Tensor, dict[str, Tensor]] = {
        parameter: new_states(param, parameter, trained.optim, trained.mesh) for param, parameter in trained.parameters
    }
    return SGD(trained.optim, groups, states)
