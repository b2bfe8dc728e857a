"""Experts, latent attention and the parts of GPTs in the ledger: dims, passes, FLOPs, activations."""

from dataclasses import replace
from math import prod

import pytest

from kumi.spec import ledger
from kumi.spec.model import MLP, Attention, LatentAttention, LayerSpec, ModelSpec, MoE, Rope

ROPE = Rope(10000.0)
EXPERTS = MoE(8, 3, 48, 40)
GROUPED = Attention(4, 2, 16, ROPE)
LATENT = LatentAttention(4, 24, 32, 12, 4, 10, ROPE)


def spec_of(attention=GROUPED, mlp=EXPERTS, **layer):
    return ModelSpec("tiny", 96, 64, (LayerSpec(attention, mlp, **layer),) * 2, 1e-5, 128)


def ops_of(spec):
    return {op.name.removeprefix("model.layers.0."): op for op in ledger.layer_ops(spec, 0)}


def numel_of(saved):
    return prod(dim.size for dim in saved.dims)


def test_order_of_a_layer_with_experts():
    kinds = [op.kind for op in ledger.layer_ops(spec_of(), 0) if op.name.startswith("model.layers.0.mlp")]
    assert kinds == [
        "router",
        "dispatch",
        "linear",
        "gate",
        "linear",
        "combine",
        "linear",
        "linear",
        "gate",
        "linear",
        "add",
        "add",
    ]


def test_every_token_passes_its_experts_and_all_others_once():
    ops = ops_of(spec_of())
    routed = {name for name, op in ops.items() if op.passes != 1}
    assert routed == {
        "mlp.dispatch",
        "mlp.experts.gate_up_proj",
        "mlp.experts.gate",
        "mlp.experts.down_proj",
        "mlp.combine",
    }
    assert {op.passes for name, op in ops.items() if name in routed} == {3}
    assert {name for name, op in ops.items() if op.experts} == {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"}


def test_experts_lead_the_dims_of_their_parameters_and_of_no_others():
    for op in ledger.layer_ops(spec_of(), 0):
        for param in op.params:
            assert [dim.name == "experts" for dim in param.dims] == [bool(op.experts), *[False] * (len(param.dims) - 1)]


def test_flops_of_a_layer_with_experts():
    tokens, seq_len = 10, 5
    ops = ops_of(spec_of())
    flops = {name: op.forward_flops(tokens, seq_len) for name, op in ops.items()}
    assert flops["mlp.gate"] == 2 * tokens * 64 * 8
    assert flops["mlp.experts.gate_up_proj"] == 2 * tokens * 3 * 64 * 96
    assert flops["mlp.experts.down_proj"] == 2 * tokens * 3 * 48 * 64
    assert flops["mlp.shared_experts.down_proj"] == 2 * tokens * 40 * 64
    assert all(isinstance(value, int) for value in flops.values())


def test_active_parameters_are_all_but_the_experts_not_chosen():
    spec = spec_of()
    idle = 2 * (8 - 3) * (64 * 96 + 48 * 64)
    assert ledger.active_params(spec) == ledger.num_params(spec) - idle
    dense = spec_of(mlp=MLP(48))
    assert ledger.active_params(dense) == ledger.num_params(dense)


def test_a_router_and_its_bias_are_not_cut_like_experts():
    ops = ops_of(spec_of(mlp=replace(EXPERTS, bias=True)))
    assert [param.shape for param in ops["mlp.gate"].params] == [(8, 64), (8,)]
    assert [param.shape for param in ops["mlp.experts.gate_up_proj"].params] == [(8, 96, 64), (8, 96)]
    assert ops["mlp.gate"].target.name == "scores"


def test_pieces_that_can_be_cut():
    ops = ops_of(spec_of())
    # A column of the gate goes with its column of the up projection.
    assert ops["mlp.experts.gate_up_proj"].target.count == 48
    assert ops["mlp.experts.gate_up_proj"].target.unit == 2


def test_latent_attention():
    ops = ops_of(spec_of(LATENT))
    attention = ops["self_attn.attention"]
    assert (attention.source.size, attention.target.size, attention.heads) == (4 * 16, 4 * 10, 4)
    assert attention.source.count == attention.target.count == 4
    assert attention.kv_size == 4 * 16 + 4 * 10
    assert attention.forward_flops(10, 5) == 2 * 10 * 5 * (64 + 40)
    assert sum(map(numel_of, attention.saved)) == 64 + 64 + 40 + 40 + 4
    # Latents are not cut by tensor parallelism, heads are.
    assert ops["self_attn.kv_a_proj_with_mqa"].target.name == "kv_latent"
    assert ops["self_attn.kv_b_proj"].target.count == 4
    rotary = ledger.embedding_ops(spec_of(LATENT))[0].saved[1]
    assert numel_of(rotary) == 2 * 4


def test_attention_of_fewer_positions_costs_the_same_in_the_convention_but_reaches_less_far():
    ops = ops_of(spec_of(replace(GROUPED, sliding_window=4)))
    attention = ops["self_attn.attention"]
    assert attention.window == 4
    assert attention.forward_flops(10, 100) == 2 * 10 * 100 * (64 + 64)
    assert attention.reach(100) < 4


@pytest.mark.parametrize("act", ["gelu", "relu", "relu2"])
def test_a_plain_mlp_keeps_what_its_activation_needs(act):
    ops = ops_of(spec_of(mlp=MLP(48, True, act, gated=False)))
    saved = sum(map(numel_of, ops["mlp.activation"].saved))
    assert saved == (0 if act == "relu" else 48)
    assert [param.shape for param in ops["mlp.up_proj"].params] == [(48, 64), (48,)]


def test_parts_outside_of_layers():
    spec = replace(spec_of(), norm="layernorm", learned_positions=128, embedding_norm=True)
    assert [op.kind for op in ledger.embedding_ops(spec)] == ["embedding", "positions", "norm"]
    assert ledger.embedding_ops(spec)[1].params[0].shape == (128, 64)
    assert [param.name for param in ledger.head_ops(spec)[0].params] == ["model.norm.weight", "model.norm.bias"]
