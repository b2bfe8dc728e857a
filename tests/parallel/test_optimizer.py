"""AdamW with its states there from the start."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kumi.nn import Decoder
from kumi.parallel import init_adamw
from kumi.spec.ledger import decayed_names
from kumi.spec.model import Attention, LatentAttention, LayerSpec, Mamba, ModelSpec, MoE, Rope
from kumi.spec.optim import Optim

GROUPED = Attention(4, 2, 8, Rope(100.0), qkv_bias=True, out_bias=True, qk_norm=True, sinks=True)
LATENT = LatentAttention(4, 12, 16, 8, 4, 10, Rope(100.0), bias=True)
EXPERTS = MoE(4, 2, 24, bias=True, act_limit=7.0)
SHARED = MoE(4, 2, 24, 20, topk_method="noaux_tc", gated=False)


def _module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))


def _model(*layers: LayerSpec, norm: str = "rmsnorm") -> ModelSpec:
    return ModelSpec("gpt_oss", 64, 32, layers, 1e-5, 64, norm=norm, learned_positions=16)


@pytest.mark.parametrize(
    "spec",
    [
        _model(LayerSpec(GROUPED, EXPERTS), LayerSpec(Mamba(4, 8, 5, 2, 4, 8, bias=True), None)),
        _model(LayerSpec(LATENT, SHARED), norm="layernorm"),
    ],
    ids=["biases of experts, sinks, mamba", "latent, shared, layernorm"],
)
def test_weight_decay_applies_to_matrices_and_not_to_biases_norms_and_rates(spec):
    named = dict(Decoder(spec, device="meta").named_parameters())
    optimizer = init_adamw(named.items(), decayed_names(spec), Optim(weight_decay=0.3), states=False)
    decay = {id(parameter): group["weight_decay"] for group in optimizer.param_groups for parameter in group["params"]}
    spared = ("bias", "norm.weight", "layernorm.weight", "q_norm.weight", "k_norm.weight", "A_log", ".D", "sinks")
    assert {name: decay[id(value)] for name, value in named.items()} == {
        name: 0.0 if name.endswith(spared) else 0.3 for name in named
    }


def test_steps_equal_those_of_states_made_in_the_first_step():
    ours, theirs = _module(), _module()
    plain = torch.optim.AdamW(
        [
            {"params": [p for p in theirs.parameters() if (p.ndim > 1) == matrix], "weight_decay": 0.1 * matrix}
            for matrix in (True, False)
        ],
        lr=3e-4,
        betas=(0.9, 0.95),
        eps=1e-8,
        fused=True,
    )
    optimizer = init_adamw(ours.named_parameters(), ("0.weight",), Optim())
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
    assert len(init_adamw(module.named_parameters(), ("0.weight",), Optim()).state) == 3
