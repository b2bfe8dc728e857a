"""Sharded matrices are gathered by one of their ranks, and scattered back to the same shards."""

from __future__ import annotations

from math import prod

import pytest
import torch
from torch import nn

from kumi.parallel.optim.whole_matrices import gather_to_owners, matrix_buckets, scatter_from_owners
from kumi.spec.layout import Layout
from kumi.spec.ledger import params
from kumi.spec.optim_states import is_muon_matrix
from kumi.spec.process_groups import axis
from kumi.spec.shard_slices import slices
from kumi.spec.sharding import is_routed, local_shape, shard_shape
from steps import SPECS, mesh_of


def _numbered(param):
    """Return the global tensor, whose elements are numbered."""
    return torch.arange(param.numel, dtype=torch.float64).view(param.shape)


def _part(param, layout, rank):
    """Return the shard of `rank` of the numbered tensor."""
    whole, part = _numbered(param), torch.zeros(local_shape(param, layout, rank), dtype=torch.float64)
    for part_slice in slices(param, layout, rank):
        here, there = (
            [slice(a, a + b) for a, b in zip(start, part_slice.shape)] for start in (part_slice.local, part_slice.start)
        )
        part[tuple(here)] = whole[tuple(there)]
    return part


def _exchanged(layout, family, owned):
    """Check this rank's gathered matrices of each bucket; return their count, the bucket's parameters and its ranks."""
    mesh = mesh_of(layout)
    parameters = [(param, nn.Parameter(_part(param, layout, mesh.rank))) for param in params(SPECS[family])]
    matrices = {parameter: param for param, parameter in parameters if is_muon_matrix(param)}
    counts = []
    for bucket in matrix_buckets([(param, one) for one, param in matrices.items()], mesh, owned):
        parts = [entry.parameter.detach() for entry in bucket.entries]
        wholes = gather_to_owners(bucket, parts, mesh)
        for place, whole in wholes.items():
            param = matrices[bucket.entries[place].parameter]
            experts = shard_shape(param, 1, layout.ep, 1)[0]
            first = axis(layout, "ep").index(mesh.rank) * experts if is_routed(param) else 0
            assert torch.equal(whole, _numbered(param)[first : first + experts])
        back = scatter_from_owners(bucket, {place: -whole for place, whole in wholes.items()}, parts[0], mesh)
        assert all(torch.equal(part, -one) for part, one in zip(parts, back, strict=True))
        counts.append((len(wholes), len(parts), prod(axis(layout, name).degree for name in bucket.axes)))
    return counts


@pytest.mark.parametrize("owned", [1, 400, 2**25])
@pytest.mark.parametrize(
    ("layout", "family"),
    [
        (Layout(tp=2, dp_shard=2, zero=3), "qwen"),
        (Layout(tp=4), "qwen"),  # more ranks than key-value heads
        (Layout(dp_shard=2, tp=2, zero=1, ep=1, expert_tp=2), "moe"),
        (Layout(dp_shard=4, zero=3, ep=2), "hybrid"),
    ],
)
def test_every_matrix_comes_to_one_rank_and_goes_back(ranks, layout, family, owned):
    runs = ranks(layout.world_size, _exchanged, layout, family, owned)
    for bucket in zip(*runs, strict=True):
        (total, sharing) = bucket[0][1:]
        assert sum(mine for mine, _, _ in bucket) * sharing == total * layout.world_size
    assert owned > 1 or {total for _, total, _ in runs[0]} == {1}
