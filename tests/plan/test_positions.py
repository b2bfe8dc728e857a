"""The representative pp ranks of a pipeline include the rank with the most memory."""

from __future__ import annotations

import pytest
from small import job, model

from kumi.plan.estimate import estimate, estimate_many
from kumi.spec.layout import Layout


@pytest.mark.parametrize("stages", [1, 2])
def test_a_pipeline_that_begins_with_smaller_layers(stages):
    """The first two ranks have only dense layers, and the last has few microbatches in flight."""
    layout = Layout(pp=8, stages=stages, schedule="interleaved" if stages > 1 else "1f1b")
    moe_job = job(of=model(16 * stages, experts=64, dense=4, hidden=512))
    alone, many = estimate(moe_job, layout), estimate_many(moe_job, [layout])
    assert many.memory[0] == pytest.approx(alone.peak_memory, rel=1e-6)
    assert many.seconds[0] == pytest.approx(alone.step_seconds, rel=0.05)


def test_traffic_is_that_of_the_rank_that_decides_the_step():
    """The first ranks have no experts, and dispatch no tokens."""
    moe_job = job(of=model(16, experts=16, dense=4))
    result = estimate(moe_job, Layout(pp=4, dp_shard=2, ep=2, zero=1))
    assert dict(result.time)["ep"] > 0
    exchanged = sum(entry.exposed for entry in result.collectives if entry.axis == "ep")
    assert exchanged == pytest.approx(dict(result.time)["ep"])
