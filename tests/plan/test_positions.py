"""The pp ranks that stand for all of a pipeline's: the fullest is among them."""

from __future__ import annotations

import pytest
from small import job, model

from kumi.plan.estimate import estimate, estimate_many
from kumi.spec.layout import Layout


@pytest.mark.parametrize("stages", [1, 2])
def test_a_pipeline_that_begins_with_smaller_layers(stages):
    """The second rank, too, has only dense layers, and the last has few microbatches in flight."""
    layout = Layout(pp=8, stages=stages, schedule="interleaved" if stages > 1 else "1f1b")
    wanted = job(of=model(16 * stages, experts=64, dense=4, hidden=512))
    alone, many = estimate(wanted, layout), estimate_many(wanted, [layout])
    assert many.memory[0] == pytest.approx(alone.peak_memory, rel=1e-6)
    assert many.seconds[0] == pytest.approx(alone.step_seconds, rel=0.05)


def test_traffic_is_that_of_the_rank_that_decides_the_step():
    """The first ranks have no experts, and send no tokens to them."""
    wanted = job(of=model(16, experts=16, dense=4))
    found = estimate(wanted, Layout(pp=4, dp_shard=2, ep=2, zero=1))
    assert dict(found.time)["ep"] > 0
    exchanged = sum(one.exposed for one in found.collectives if one.axis == "ep")
    assert exchanged == pytest.approx(dict(found.time)["ep"])
