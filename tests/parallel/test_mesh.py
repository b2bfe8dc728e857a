"""Meshes, groups and the sums over them."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from kumi.errors import LayoutError
from kumi.parallel import RankInfo, all_reduce_max, all_reduce_sum, barrier, build_mesh, init_distributed
from kumi.spec.layout import Layout
from rank_groups import groups_by_coords


def test_one_process_has_no_group():
    mesh = build_mesh(Layout(), RankInfo(0, 1, 0, torch.device("cpu")))
    assert mesh.is_single
    assert mesh.group("data") is None
    assert mesh.group("dp_shard") is None
    assert all_reduce_sum(torch.tensor(3.0), mesh) == 3.0
    barrier(mesh)


def test_a_layout_of_another_size_is_refused():
    with pytest.raises(LayoutError, match=r"needs 4 ranks \(.*dp_shard 2.*\), 1 were started"):
        build_mesh(Layout(dp_replicate=2, dp_shard=2, zero=1), RankInfo(0, 1, 0, torch.device("cpu")))


def _groups(layout):
    mesh = build_mesh(layout, init_distributed())
    groups = {}
    for name in ("dp_replicate", "dp_shard"):
        group = mesh.group(name)
        groups[name] = None if group is None else tuple(dist.get_process_group_ranks(group))
    transposed = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).T * mesh.rank  # not contiguous
    largest = all_reduce_max(torch.tensor(mesh.rank), mesh).item()
    return mesh.device_mesh(*groups).mesh_dim_names, groups, all_reduce_sum(transposed, mesh).tolist(), largest


@pytest.mark.parametrize(
    "layout", [Layout(dp_replicate=4), Layout(dp_shard=4, zero=3), Layout(dp_replicate=2, dp_shard=2, zero=2)]
)
def test_groups_are_those_of_the_layout(ranks, layout):
    for rank, (names, groups, summed, largest) in enumerate(ranks(4, _groups, layout)):
        assert names == tuple(name for name in ("dp_replicate", "dp_shard") if getattr(layout, name) > 1)
        for name, members in groups.items():
            expected = next(group for group in groups_by_coords(layout, name) if rank in group)
            assert members == (expected if len(expected) > 1 else None)
        assert summed == [[6.0, 18.0], [12.0, 24.0]]
        assert largest == 3


def _mesh_on(layout, kind, **options):
    """Return the mesh of ranks with devices of a `kind`, and the backends that its new groups ask for."""
    backends, new_group = [], dist.new_group

    def with_gloo(members, backend, **settings):
        backends.append(backend)
        return new_group(members, **settings)

    place = init_distributed()
    with patch.object(dist, "new_group", with_gloo):
        return build_mesh(layout, replace(place, device=torch.device(kind)), **options), backends


def _shared(layout, kind):
    """Return the pairs of axes that share a process group on devices of a `kind`."""
    groups = _mesh_on(layout, kind)[0].groups
    return {(one, other) for one, other in combinations(groups, 2) if groups[one] is groups[other]}


def _made(layout, kind, experts=True):
    mesh, backends = _mesh_on(layout, kind, experts=experts)
    return set(mesh.groups), backends


def test_gpus_have_groups_of_their_own_for_what_goes_on_at_the_same_time(ranks):
    """NCCL runs the operations of a group one after the other."""
    piped, contexts = Layout(pp=2), Layout(cp=2, zero=3)
    assert {"activation up 0", "gradient up 1"}.isdisjoint(ranks(2, _made, piped, "cpu")[0][0])
    assert ("cp", "zero") in ranks(2, _shared, contexts, "cpu")[0]
    groups = ranks(2, _shared, piped, "cuda")[0]
    assert ("pp", "norm") in groups
    names = ranks(2, _made, piped, "cuda")[0][0]
    assert {"activation up 0", "gradient up 1"} <= names
    assert not any("activation" in one or "activation" in other for one, other in groups)
    groups = ranks(2, _shared, contexts, "cuda")[0]
    assert ("zero", "data") in groups
    assert ("cp", "zero") not in groups


def test_groups_of_gpus_have_no_gloo_unless_states_are_on_the_host(ranks):
    layout = Layout(dp_replicate=2, dp_shard=2, zero=3)
    assert set(ranks(4, _made, layout, "cuda")[0][1]) == {"nccl"}
    assert set(ranks(4, _made, replace(layout, offload="states"), "cuda")[0][1]) == {None}
    assert set(ranks(4, _made, layout, "cpu")[0][1]) == {None}


def test_a_model_without_experts_has_no_groups_for_them(ranks):
    layout = Layout(dp_shard=2, tp=2, zero=3)
    (with_experts, more), (without, fewer) = (ranks(4, _made, layout, "cuda", each)[0] for each in (True, False))
    assert with_experts - without == {"expert_dp", "expert_data"}
    assert without <= with_experts
    assert len(fewer) < len(more)
