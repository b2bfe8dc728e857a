"""The parts that ranks hold tile every parameter, and copies hold the same."""

from __future__ import annotations

from collections import Counter
from itertools import product
from math import prod

import numpy as np
import pytest

from kumi.spec.layout import Layout
from kumi.spec.ledger import params
from kumi.spec.model import MLP, Attention, LayerSpec, ModelSpec, MoE, Rope
from kumi.spec.shard_slices import replica_axes, slices
from kumi.spec.sharding import local_shape

DENSE = ModelSpec(
    "qwen3", 250, 16, (LayerSpec(Attention(8, 2, 4, Rope(1e4), qkv_bias=True, qk_norm=True), MLP(24)),), 1e-5, 64
)
SPARSE = ModelSpec("qwen3_moe", 250, 16, (LayerSpec(Attention(8, 2, 4, Rope(1e4)), MoE(8, 2, 12)),), 1e-5, 64)
LAYOUTS = [
    (DENSE, Layout(tp=4)),
    (DENSE, Layout(tp=2, dp_shard=3, zero=3)),
    (DENSE, Layout(tp=4, cp=2, dp_replicate=2, zero=1)),
    (DENSE, Layout(tp=8)),
    (SPARSE, Layout(dp_shard=4, ep=4, zero=3)),
    (SPARSE, Layout(dp_shard=4, tp=2, ep=2, zero=3)),
    (SPARSE, Layout(dp_shard=2, tp=2, ep=2, expert_tp=2, zero=1)),
    (SPARSE, Layout(dp_replicate=2, tp=4, ep=2, expert_tp=2)),
    (SPARSE, Layout(dp_shard=3, tp=2, ep=2, expert_tp=1, zero=2)),
]


@pytest.mark.parametrize(("model", "layout"), LAYOUTS)
def test_every_element_is_held_by_as_many_ranks_as_there_are_copies(model, layout):
    for param in params(model):
        owners = np.zeros(param.shape, dtype=int)
        for rank in range(layout.world_size):
            for region in slices(param, layout, rank):
                owners[tuple(slice(a, a + n) for a, n in zip(region.start, region.shape, strict=True))] += 1
        assert set(owners.ravel()) == {prod(one.degree for one in replica_axes(param, layout))}, param.name


@pytest.mark.parametrize(("model", "layout"), LAYOUTS)
def test_a_rank_s_tensor_is_its_regions_and_padding(model, layout):
    for param, rank in product(params(model), range(layout.world_size)):
        shape = local_shape(param, layout, rank)
        parts = slices(param, layout, rank)
        inside = Counter()
        for region in parts:
            inside.update(product(*(range(a, a + n) for a, n in zip(region.local, region.shape, strict=True))))
        assert set(inside.values()) <= {1}
        assert all(0 <= i < n for index in inside for i, n in zip(index, shape, strict=True))
        if param.dims[0].name != "vocab":
            assert len(inside) == prod(shape)


@pytest.mark.parametrize(("model", "layout"), LAYOUTS)
def test_copies_hold_the_same(model, layout):
    for param, rank in product(params(model), range(layout.world_size)):
        for replica_axis in replica_axes(param, layout):
            assert len({slices(param, layout, other) for other in replica_axis.group(rank)}) == 1
