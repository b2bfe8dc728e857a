"""The shards of every parameter add up to the model, and optimizer states have the bytes of real ones."""

from __future__ import annotations

from collections import Counter
from math import prod

import pytest

from kumi.spec.layout import Layout
from kumi.spec.ledger import Dim, Param, layer_ops, num_params, params
from kumi.spec.model import MLP, Attention, LayerSpec, ModelSpec, MoE, Rope
from kumi.spec.optim import Optim
from kumi.spec.precision import PRECISIONS
from kumi.spec.sharding import (
    checkpoint_bytes,
    fsdp_units,
    local_numel,
    local_shape,
    rank_params,
    shard_size,
    stage_ops,
    tp_style,
)
from kumi.spec.sharding import state_bytes as rank_bytes

ATTENTION = Attention(8, 2, 16, Rope(10000.0), qk_norm=True)
DENSE = ModelSpec("llama", 256, 128, (LayerSpec(ATTENTION, MLP(320)),) * 4, 1e-5, 256)
TIED = ModelSpec("llama", 256, 128, (LayerSpec(ATTENTION, MLP(320)),) * 5, 1e-5, 256, tie_word_embeddings=True)
SPARSE = ModelSpec("moe", 256, 128, (LayerSpec(ATTENTION, MoE(8, 2, 64, 96)),) * 2, 1e-5, 256)


def test_styles_of_a_layer():
    styles = {op.name.rpartition(".")[2]: tp_style(op) for op in layer_ops(DENSE, 0)}
    columns = {name for name, one in styles.items() if one == "column"}
    assert columns == {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}
    assert {name for name, one in styles.items() if one == "row"} == {"o_proj", "down_proj"}
    router = next(op for op in layer_ops(SPARSE, 0) if op.kind == "router")
    assert tp_style(router) == "replicated"


@pytest.mark.parametrize(("degree", "size"), [(1, 32), (2, 16), (4, 16), (8, 16)])
def test_key_heads_are_cut_as_wholes_and_held_by_several_where_ranks_outnumber_them(degree, size):
    assert shard_size(Dim("kv_heads", 32, 16), degree) == size


def test_a_vocabulary_that_tp_does_not_divide_is_padded():
    assert local_shape(Param("w", (Dim("vocab", 250), Dim("embed", 6))), Layout(tp=4), 3) == (63, 6)


LAYOUTS = [
    Layout(tp=2, dp_replicate=2),
    Layout(tp=2, dp_shard=2, cp=2, zero=3),
    Layout(dp_shard=8, cp=1, zero=1),
    Layout(dp_replicate=2, cp=4, zero=2),
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_parts_of_dense_parameters_add_up(layout):
    shards = layout.tp * (layout.dp_shard * layout.cp if layout.zero else 1)
    for param in params(DENSE):
        elements = sum(local_numel(param, layout, rank) for rank in range(layout.world_size))
        whole = not any(dim.name in ("vocab", "heads", "kv_heads", "ffn") for dim in param.dims)
        assert elements == param.numel * layout.world_size // (shards // layout.tp if whole else shards)


@pytest.mark.parametrize(
    ("layout", "copies"),
    [
        (Layout(dp_shard=8, ep=4, zero=3), 1),
        (Layout(dp_shard=4, tp=2, ep=4, zero=3), 1),
        (Layout(dp_shard=4, tp=2, ep=2, expert_tp=2, zero=1), 1),
        (Layout(dp_replicate=2, dp_shard=4, ep=2, zero=3), 2),
        (Layout(dp_shard=2, cp=2, tp=2, ep=8, zero=3), 1),
    ],
)
def test_parts_of_experts_add_up(layout, copies):
    """Experts are sharded over dp_shard x cp x tp: by ep, expert_tp, and over the remaining ranks by ZeRO."""
    for param in params(SPARSE):
        if param.dims[0].name == "experts":
            shapes = [local_shape(param, layout, rank) for rank in range(layout.world_size)]
            assert sum(map(prod, shapes)) == copies * param.numel
            assert {shape[0] for shape in shapes} == {8 // layout.ep}


@pytest.mark.parametrize("model", [DENSE, TIED])
@pytest.mark.parametrize(
    "layout",
    [
        Layout(pp=2),
        Layout(pp=4),
        Layout(pp=2, stages=2, schedule="zb-v"),
        Layout(pp=2, stages=2, schedule="interleaved"),
        Layout(pp=2, stage_layers=(1, 3)),
    ],
)
def test_every_parameter_is_on_one_rank_and_a_tied_head_on_two(model, layout):
    if layout.stage_layers and model is TIED:
        layout = Layout(pp=2, stage_layers=(1, 4))
    ranks = range(layout.pp)
    counts = Counter(param for rank in ranks for param in rank_params(model, layout, rank))
    assert set(counts) == set(params(model))
    several = {param.name for param, count in counts.items() if count > 1}
    # A V brings embedding and head back to one rank, which are then one tensor.
    apart = model is TIED and layout.schedule != "zb-v"
    assert several == ({"model.embed_tokens.weight"} if apart else set())


def test_states_of_all_ranks_add_up_to_the_model():
    layout, optim = Layout(pp=2, dp_shard=2, cp=2, tp=1, zero=3), Optim()
    ranks = [rank_bytes(DENSE, layout, rank, PRECISIONS["bf16"], optim) for rank in range(layout.world_size)]
    assert sum(rank.params for rank in ranks) == 4 * num_params(DENSE)
    counters = 4 * sum(len(rank_params(DENSE, layout, rank)) for rank in range(layout.world_size))
    assert sum(rank.optimizer for rank in ranks) == 8 * num_params(DENSE) + counters


def test_a_checkpoint_has_parameters_and_moments_once():
    assert checkpoint_bytes(DENSE, PRECISIONS["bf16"], Optim()) == 12 * num_params(DENSE) + 4 * len(params(DENSE))


def named(model, layers, **stage):
    """The FSDP units of a stage: names, modules, and the parameters of those that are not layers."""
    units = fsdp_units(stage_ops(model, layers, **stage))
    return [
        (one.name, *one.modules, *([] if "layer" in one.modules[0] else [param.name for param in one.params]))
        for one in units
    ]


def test_units_of_a_stage_are_its_tables_layers_experts_and_head():
    head = ("head", "model.norm", "lm_head", "model.norm.weight", "lm_head.weight")
    table = ("embedding", "model.embed_tokens", "model.embed_tokens.weight")
    assert named(DENSE, (0,), embedding=True, head=True) == [table, ("layer", "model.layers.0"), head]
    assert named(SPARSE, (1,), embedding=False, head=True) == [
        ("layer", "model.layers.1"),
        ("experts", "model.layers.1.mlp.experts"),
        head,
    ]
    assert named(DENSE, (1, 2), embedding=False, head=False) == [("layer", f"model.layers.{index}") for index in (1, 2)]


def test_a_tied_table_is_the_roots_where_the_head_is_and_a_unit_of_its_own_elsewhere():
    table, norm = "model.embed_tokens.weight", "model.norm.weight"
    assert named(TIED, (), embedding=True, head=True) == [("root", "", table, norm)]
    assert named(TIED, (), embedding=True, head=False) == [("embedding", "model.embed_tokens", table)]
    assert named(TIED, (), embedding=False, head=True) == [("root", "", norm, table)]
    assert named(TIED, (), embedding=False, head=True, shared=True) == [("root", "", norm)]
