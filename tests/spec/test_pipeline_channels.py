"""The channels of pipelines: a rank meets one neighbour in each, so no message waits for another neighbour's."""

from __future__ import annotations

from collections import defaultdict

import pytest

from kumi.spec.pipeline_channels import channel_name, pipeline_channels
from kumi.spec.sends_and_recvs import Receive, Send, pipeline_steps

CASES = [
    (schedule, pp, stages)
    for schedule, stages in (("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zb-h1", 1), ("zb-v", 2))
    for pp in (2, 3, 4, 5, 8)
]


@pytest.mark.parametrize(("schedule", "pp", "stages"), CASES)
def test_a_channel_joins_each_rank_with_one_neighbour_in_one_direction(schedule, pp, stages):
    met, used = defaultdict(set), set()
    for rank, steps in enumerate(pipeline_steps(schedule, pp, stages, 4 * pp)):
        for step in steps:
            if isinstance(step, Send | Receive):
                message = step.message
                name = channel_name(message.kind, message.source, message.target, pp)
                met[rank, name].add((message.source, message.target))
                used.add(name)
    assert all(len(edges) == 1 for edges in met.values())
    assert tuple(sorted(used)) == pipeline_channels(schedule, pp, stages)


def test_few_channels_suffice():
    assert pipeline_channels("1f1b", 2, 1) == ("activation up 0", "gradient up 1")
    assert len(pipeline_channels("1f1b", 8, 1)) == 4
    assert len(pipeline_channels("interleaved", 8, 2)) == 4
    assert len(pipeline_channels("interleaved", 5, 2)) == 6
    assert len(pipeline_channels("zb-v", 8, 2)) == 8
