"""The messages that the planner lists for a step are those that the trainer sends: kinds, groups, counts and bytes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kumi.parallel import build, clip_gradients
from kumi.plan.traffic import collectives
from kumi.spec.layout import Layout
from kumi.spec.precision import PRECISIONS
from planned import job_of
from steps import LENGTH, SEQUENCES, SPECS, forward_backward, mesh_of

DIVIDED = [
    *(Layout(dp_shard=4, zero=zero) for zero in (1, 2, 3)),
    *(Layout(dp_replicate=2, dp_shard=2, zero=zero) for zero in (1, 2, 3)),
]
KINDS = {"_allgather_base_": "all_gather", "_reduce_scatter_base_": "reduce_scatter", "allreduce_": "all_reduce"}
# The sum of the loss over all ranks, in float64, is the caller's message and no part of the step.
LOSS = ("all_reduce", 4, 8)
MICROBATCHES = (1, 3)


class Watch(TorchDispatchMode):
    """The collectives that run inside, counted by (kind, ranks of the group, bytes of the whole tensor)."""

    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            leaves = tree_leaves(args)
            group = next(leaf for leaf in leaves if isinstance(leaf, torch.ScriptObject))
            ranks = torch.distributed.ProcessGroup.unbox(group).size()
            size = max(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor))
            self.seen[KINDS[func._opname], ranks, size] += 1
        return func(*args, **(kwargs or {}))


def _sent(layout, family, kind):
    """What this rank takes part in during a step of each number of `MICROBATCHES`."""
    mesh = mesh_of(layout)
    model, found = build(SPECS[family], mesh, PRECISIONS[kind], weights=0), []
    for _ in range(2 if layout.zero == 0 else 0):
        # DistributedDataParallel tells its ranks once, in the second step, in which order gradients come.
        forward_backward(model, mesh, 0, 1)
    for microbatches in MICROBATCHES:
        with Watch() as watch:
            forward_backward(model, mesh, 0, microbatches)
            clip_gradients(model, 1.0, mesh)
        watch.seen[LOSS] -= 1
        found.append(+watch.seen)
    return found


def _planned(layout, family, kind, microbatches):
    """What the planner lists, counted in the same way."""
    job = job_of(SPECS[family], seq_len=LENGTH, sequences=SEQUENCES, kind=kind)
    layout = replace(layout, microbatch=SEQUENCES // (layout.dp * microbatches))
    assert job.batch.microbatches(layout) == microbatches
    found = Counter()
    for one in collectives(job, layout):
        found[one.kind, one.degree, one.bytes] += one.count
    return found


@pytest.mark.parametrize(
    ("family", "layout", "kind"),
    [
        *(("llama", layout, "bf16") for layout in DIVIDED),
        *(("qwen", layout, "bf16") for layout in (DIVIDED[0], DIVIDED[2], DIVIDED[5])),
        ("llama", DIVIDED[2], "fp32"),
    ],
)
def test_divided_states(ranks, family, layout, kind):
    said = [_planned(layout, family, kind, microbatches) for microbatches in MICROBATCHES]
    assert {kind for kind, _, _ in said[0]} >= {"all_gather", "reduce_scatter", "all_reduce"}
    for sent in ranks(4, _sent, layout, family, kind):
        assert sent == said


@pytest.mark.parametrize("family", SPECS)
def test_copies_send_as_many_bytes_in_buckets_of_their_own(ranks, family):
    layout = Layout(dp_replicate=4)
    for sent in ranks(4, _sent, layout, family, "bf16"):
        for seen, microbatches in zip(sent, MICROBATCHES, strict=True):
            (((kind, degree, size), count),) = _planned(layout, family, "bf16", microbatches).items()
            assert (kind, degree, count) == ("all_reduce", 4, 1)
            assert {key[:2] for key in seen} == {("all_reduce", 4)}
            assert sum(one * times for (_, _, one), times in seen.items()) == size
