"""AdamW over this rank's part of the parameters."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kumi.parallel.grad_norm import local
from kumi.parallel.optim.optimizer import drop_gradients, gradient_of, groups_of
from kumi.spec.optim import Optim
from kumi.spec.optim_states import COUNTER, MOMENTS


@dataclass(frozen=True)
class AdamW:
    """Parameters in groups, each with its own settings, and the states of every trained parameter.

    The same fused kernel and the same names as in torch.optim.AdamW, whose making and first step would import torch's
    compiler: a second of CPU time in every rank.
    """

    optim: Optim
    param_groups: list[dict[str, Any]]
    state: dict[Tensor, dict[str, Tensor]]

    @torch.no_grad()
    def step(self) -> None:
        """One update of every parameter that has a gradient."""
        for group in self.param_groups:
            update_group(group, self.state)

    def zero_grad(self) -> None:
        """Drops the gradients and their memory."""
        drop_gradients(self.param_groups)


def update_group(group: dict[str, Any], states: dict[Tensor, dict[str, Tensor]]) -> None:
    """Update the parameters in `group` that have a gradient, in place, and count the step."""
    trained = [parameter for parameter in group["params"] if parameter.grad is not None]
    if not trained:
        return
    means, squares = ([local(states[parameter][name]) for parameter in trained] for name in MOMENTS)
    steps = [states[parameter][COUNTER] for parameter in trained]
    torch._foreach_add_(steps, 1)
    gradients = [gradient_of(parameter) for parameter in trained]
    update(group, [local(parameter) for parameter in trained], gradients, means, squares, steps)


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

    Weight decay applies to the parameters whose names are in `decayed` (of a model: `kumi.spec.ledger.decayed_names`).
    States exist from the start so that a checkpoint before the first step is complete and memory does not grow during
    it; without `states` there are none. The learning rate is the caller's to set.
    """
    named = [(name, parameter) for name, parameter in named_parameters if parameter.requires_grad]
    made: dict[Tensor, dict[str, Tensor]] = {one: adamw_states(one) for _, one in named} if states else {}
    return AdamW(optim, groups_of([(parameter, name in decayed) for name, parameter in named], optim), made)


def adamw_states(parameter: nn.Parameter) -> dict[str, Tensor]:
    """Return the states of `parameter`, zero; the moments are sharded as it is."""
    return {
        COUNTER: torch.zeros((), dtype=torch.float32, device=parameter.device),
        **{name: torch.zeros_like(parameter, requires_grad=False) for name in MOMENTS},
    }
