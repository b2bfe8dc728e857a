"""AdamW with its states there from the start."""

from __future__ import annotations

import torch
from torch import nn

from kumi.parallel import init_adamw
from kumi.spec.optim import Optim


def _module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))


def test_matrices_are_decayed_and_vectors_are_not():
    optimizer = init_adamw(_module().named_parameters(), Optim(weight_decay=0.3))
    found = {parameter.ndim: group["weight_decay"] for group in optimizer.param_groups for parameter in group["params"]}
    assert found == {2: 0.3, 1: 0.0}


def test_steps_equal_those_of_states_made_in_the_first_step():
    ours, theirs = _module(), _module()
    plain = torch.optim.AdamW(
        [{"params": [p for p in theirs.parameters() if (p.ndim > 1) == decayed], "weight_decay": 0.1 * decayed}
         for decayed in (True, False)], lr=3e-4, betas=(0.9, 0.95), eps=1e-8, fused=True,
    )  # fmt: skip
    optimizer = init_adamw(ours.named_parameters(), Optim())
    assert {name for state in optimizer.state.values() for name in state} == {"step", "exp_avg", "exp_avg_sq"}
    for step in range(3):
        for module, update in ((ours, optimizer), (theirs, plain)):
            torch.manual_seed(step)
            module(torch.randn(5, 3)).square().sum().backward()
            update.step()
            update.zero_grad()
    assert all(torch.equal(mine, other) for mine, other in zip(ours.parameters(), theirs.parameters()))


def test_frozen_parameters_have_no_state():
    module = _module()
    module[0].weight.requires_grad_(False)
    assert len(init_adamw(module.named_parameters(), Optim()).state) == 3
