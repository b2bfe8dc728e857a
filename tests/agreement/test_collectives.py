"""The collectives of a step, counted by PyTorch, are those that `kumi.spec.collectives` says."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kumi.parallel import build, clip_gradients
from kumi.spec.collectives import Collectives, data_collectives
from kumi.spec.layout import Layout
from kumi.spec.ledger import num_params
from kumi.spec.precision import PRECISIONS
from planned import gathered_of
from steps import SPECS, forward_backward, mesh_of

DIVIDED = [
    *(Layout(dp_shard=4, zero=zero) for zero in (1, 2, 3)),
    *(Layout(dp_replicate=2, dp_shard=2, zero=zero) for zero in (1, 2, 3)),
]


def _step(model, mesh, step, microbatches):
    forward_backward(model, mesh, step, microbatches)
    clip_gradients(model, 1.0, mesh)


class Watch(TorchDispatchMode):
    """The collectives that run inside, as (name, bytes of the tensors). Unlike CommDebugMode it bears microbatches."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
            self.seen.append((func._opname, sum(tensor.nbytes for tensor in tensors)))
        return func(*args, **(kwargs or {}))


def _counted(layout, family, microbatches):
    """Collectives of the second step by name, and CommDebugMode's count where there is one microbatch."""
    mesh = mesh_of(layout)
    model = build(SPECS[family], mesh, PRECISIONS["bf16"], weights=0)
    _step(model, mesh, 0, microbatches)
    with Watch() as watch:
        _step(model, mesh, 1, microbatches)
    with CommDebugMode() as mode:
        if microbatches == 1:
            _step(model, mesh, 2, microbatches)
    largest = max(size for name, size in watch.seen if name == "_allgather_base_")
    return Counter(name for name, _ in watch.seen), mode.get_total_counts(), largest


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("family", SPECS)
@pytest.mark.parametrize("layout", DIVIDED)
def test_divided_states(ranks, layout, family, microbatches):
    said = data_collectives(SPECS[family], layout, microbatches)
    transfer = gathered_of(SPECS[family], layout, "bf16", microbatches).transfer
    for counts, debug_count, largest in ranks(4, _counted, layout, family, microbatches):
        loss = 1  # the all-reduce of the loss is the caller's
        found = Collectives(counts["_allgather_base_"], counts["_reduce_scatter_base_"], counts["allreduce_"] - loss)
        assert found == said
        assert counts.total() == sum(vars(said).values()) + loss
        assert largest == transfer + transfer // layout.dp_shard  # what is gathered, and the rank's own part
        assert debug_count == (counts.total() if microbatches == 1 else 0)


def _all_reduced(family, microbatches):
    mesh = mesh_of(Layout(dp_replicate=2))
    model = build(SPECS[family], mesh, PRECISIONS["bf16"], weights=0)
    with Watch() as watch:
        _step(model, mesh, 0, microbatches)
    assert {name for name, _ in watch.seen} == {"allreduce_"}
    return sum(size for _, size in watch.seen)


@pytest.mark.parametrize("family", SPECS)
def test_replicas_send_every_gradient_once_a_step(ranks, family):
    loss = 8
    for microbatches in (1, 3):
        assert ranks(2, _all_reduced, family, microbatches) == [4 * num_params(SPECS[family]) + loss] * 2
