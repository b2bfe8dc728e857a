import pytest

from kumi.spec.layout import Layout
from kumi.spec.ledger import Dim, Param
from kumi.spec.sharding import local_numel, shard_rows

LAYOUTS = [Layout(), Layout(dp_replicate=4), Layout(pp=2, dp_replicate=2, dp_shard=3, cp=2, tp=2, zero=3)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_coords_and_rank_are_inverse(layout):
    assert [layout.rank(layout.coords(rank)) for rank in range(layout.world_size)] == list(range(layout.world_size))


@pytest.mark.parametrize(("size", "degree"), [(8, 4), (10, 4), (3, 4), (250, 4), (1, 8), (7, 1)])
def test_shards_tile_the_rows(size, degree):
    shards = [shard_rows(size, degree, index) for index in range(degree)]
    covered = [row for shard in shards for row in range(shard.start, shard.start + shard.count)]
    assert covered == list(range(size))


def test_local_numel_adds_up_over_the_shards_and_repeats_over_replicas():
    param = Param("w", (Dim("vocab", 250), Dim("embed", 6)))
    layout = Layout(dp_replicate=2, dp_shard=4, zero=1)
    assert sum(local_numel(param, layout, rank) for rank in range(8)) == 2 * param.numel
    assert local_numel(param, Layout(dp_replicate=8), 3) == param.numel
