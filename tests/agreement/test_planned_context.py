"""The messages of context-parallel attention match the planner's list: kinds, counts and bytes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product
from unittest.mock import patch

import pytest
import torch.distributed as dist

from grids import sampled
from kumi.parallel import build
from kumi.plan.time.traffic import collectives
from kumi.spec.layout import Layout
from kumi.spec.precision import PRECISIONS
from planned import job_of
from steps import LENGTH, SEQUENCES, SPECS, forward_backward, mesh_of

MICROBATCHES = 3


def _sent(layout, family, kind):
    """Return the messages between context-parallel ranks in a step, by (kind, ranks of the group, bytes)."""
    mesh, sent_messages = mesh_of(layout), Counter()
    model = build(SPECS[family], mesh, PRECISIONS[kind], weights=0)
    exchange, deal = dist.batch_isend_irecv, dist.all_to_all_single

    def passed(ends):
        assert [entry.op for entry in ends] == [dist.isend, dist.irecv]
        sent_messages.update(
            ("send", entry.group.size(), entry.tensor.nbytes) for entry in ends if entry.op is dist.isend
        )
        return exchange(ends)

    def dealt(out, given, group):
        sent_messages["all_to_all", group.size(), given.nbytes] += 1
        return deal(out, given, group=group)

    with patch.object(dist, "batch_isend_irecv", passed), patch.object(dist, "all_to_all_single", dealt):
        forward_backward(model, mesh, 0, MICROBATCHES)
    return sent_messages


LAYOUTS = {
    "ring-2": (Layout(cp=2, dp_replicate=2), "bf16"),
    "ring-4": (Layout(cp=4), "fp64"),
    "ulysses-4": (Layout(cp=4, context="ulysses"), "bf16"),
    "ulysses-2": (Layout(cp=2, dp_shard=2, zero=3, context="ulysses"), "fp32"),
}
CASES = list(product(LAYOUTS, ("none", "selective", "full")))
# By default both ways with every recomputation.
OFTEN = [
    ("ring-2", "none"),
    ("ring-4", "selective"),
    ("ring-2", "full"),
    ("ulysses-2", "none"),
    ("ulysses-2", "selective"),
    ("ulysses-4", "full"),
]


@pytest.mark.parametrize(("name", "recompute"), sampled(CASES, lambda place: CASES[place] in OFTEN))
def test_messages_are_those_of_the_planner(ranks, name, recompute):
    layout, kind = LAYOUTS[name]
    layout = replace(layout, recompute=recompute, microbatch=SEQUENCES // (layout.dp * MICROBATCHES))
    planned = Counter()
    for entry in collectives(job_of(SPECS["llama"], seq_len=LENGTH, sequences=SEQUENCES, kind=kind), layout):
        if entry.axis == "cp":
            planned[entry.kind, entry.degree, entry.bytes] += entry.count
    assert planned
    for sent in ranks(4, _sent, layout, "llama", kind):
        assert sent == planned
