"""AdamW over this rank's shards of the parameters."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kumi.parallel.optim.optimizer import count_change, drop_grads, local_grad, make_param_groups
from kumi.parallel.stage_modules import local_shard
from kumi.spec.optim import Optim
from kumi.spec.optim_states import COUNTER, MOMENTS


@dataclass(frozen=True)
class AdamW:
    """Parameters in groups, each with its own settings, and the states of every trained parameter.

    The fused kernel and the names are those of torch.optim.AdamW. Its constructor and first step would import torch's
    compiler, a second of CPU time in every rank.
    """

    optim: Optim
    param_groups: list[dict[str, Any]]
    state: dict[Tensor, dict[str, Tensor]]

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            update_param_group(group, self.state)

    def zero_grad(self) -> None:
        """Free the gradients."""
        drop_grads(self.param_groups)


def update_param_group(group: dict[str, Any], states: dict[Tensor, dict[str, Tensor]]) -> None:
    """Update the parameters in `group` that have a gradient, in place, and count the step."""
    trained = [parameter for parameter in group["params"] if parameter.grad is not None]
    if not trained:
        return
    means, squares = ([local_shard(states[parameter][name]) for parameter in trained] for name in MOMENTS)
    steps = [states[parameter][COUNTER] for parameter in trained]
    torch._foreach_add_(steps, 1)
    gradients = [local_grad(parameter) for parameter in trained]
    adamw_update(group, [local_shard(parameter) for parameter in trained], gradients, means, squares, steps)


def adamw_update(
    group: dict[str, Any],
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    means: Sequence[Tensor],
    squares: Sequence[Tensor],
    steps: Sequence[Tensor],
) -> None:
    """Update `parameters` in place by AdamW with the settings of `group`; `steps` already count this step."""
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
    count_change(parameters)


def init_adamw(
    named_parameters: Iterable[tuple[str, nn.Parameter]], decayed: Container[str], optim: Optim, *, states: bool = True
) -> AdamW:
    """Return AdamW over `named_parameters`, plain or sharded, with its states allocated and zero.

    Weight decay applies to the parameters with names in `decayed` (of a model: `kumi.spec.ledger.decayed_names`).
    States exist from the start so that a checkpoint before the first step is complete and memory does not grow in that
    step. `states=False`: without states. The caller sets the learning rate.
    """
    named = [(name, parameter) for name, parameter in named_parameters if parameter.requires_grad]
    values: dict[Tensor, dict[str, Tensor]] = {}
    if states:
        values = {parameter: adamw_states(parameter) for _, parameter in named}
    return AdamW(optim, make_param_groups([(parameter, name in decayed) for name, parameter in named], optim), values)


def adamw_states(parameter: nn.Parameter) -> dict[str, Tensor]:
    """Return the states of `parameter`, zero; the moments are sharded like the parameter."""
    return {
        COUNTER: torch.zeros((), dtype=torch.float32, device=parameter.device),
        **{name: torch.zeros_like(parameter, requires_grad=False) for name in MOMENTS},
    }
