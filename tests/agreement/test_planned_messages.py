"""The planner counts the messages of a pipeline that the trainer sends."""

from collections import Counter
from dataclasses import replace

import pytest

from kumi.plan.time.traffic import collectives
from kumi.spec.batch import BatchSpec
from kumi.spec.layout import Layout
from kumi.spec.sends_and_recvs import ACTIVATION, Send, pipeline_steps
from planned import job_of
from steps import SPECS

STAGES = {"1f1b": 1, "gpipe": 1, "interleaved": 2, "zb-h1": 1, "zb-h2": 1, "zb-v": 2, "dualpipe": 2}


@pytest.mark.parametrize("schedule", STAGES)
@pytest.mark.parametrize("pp", [2, 4])
def test_messages(schedule, pp):
    layout, microbatches = Layout(pp=pp, schedule=schedule, stages=STAGES[schedule]), 8
    job = replace(job_of(SPECS["deep"]), batch=BatchSpec(8, 8 * microbatches))
    for rank, steps in enumerate(pipeline_steps(schedule, pp, layout.stages, microbatches)):
        sent = Counter(entry.message.kind == ACTIVATION for entry in steps if isinstance(entry, Send))
        planned = Counter()
        for entry in collectives(job, layout, rank):
            if entry.kind == "send" and entry.axis == "pp":
                planned[entry.what == "activations"] += entry.count
        assert planned == sent
