import json
from dataclasses import replace

import pytest
from examples import CHOSEN, best, job

from kumi.plan.trace import pipeline, trace
from kumi.plan.types import StageEstimate


def events(found, phase="X"):
    return [event for event in found["traceEvents"] if event["ph"] == phase]


def test_every_action_is_an_event_of_its_rank_in_microseconds():
    timeline = pipeline(job(sequences=16), best())
    found = json.loads(json.dumps(trace(timeline), allow_nan=False))
    assert len(events(found)) == sum(map(len, timeline.spans)) == 4 * 2 * 8
    for rank, spans in enumerate(timeline.spans):
        own = [event for event in events(found) if event["pid"] == rank]
        assert [event["ts"] for event in own] == pytest.approx([1e6 * span.start for span in spans])
        assert [event["name"] for event in own] == [f"{span.action.kind}{span.action.microbatch}" for span in spans]
        assert {event["args"]["stage"] for event in own} == {rank}
    assert max(event["ts"] + event["dur"] for event in events(found)) == pytest.approx(1e6 * timeline.seconds)


def test_ranks_have_names_and_order():
    named = events(trace(pipeline(job(), best())), "M")
    assert [event["args"]["name"] for event in named if event["name"] == "process_name"] == [
        f"pp rank {rank}" for rank in range(4)
    ]
    assert {event["name"] for event in named} == {"process_name", "process_sort_index", "thread_name"}


def test_the_pipeline_takes_what_its_stages_take():
    """1F1B with equal stages: (m + p - 1) (F + B), and 2 (p - 1) transfers on the way there and back."""
    made = best()
    free = replace(made, collectives=tuple(item for item in made.collectives if item.axis != "pp"))
    each = made.stages[0].forward + made.stages[0].backward_input + made.stages[0].backward_weight
    assert pipeline(job(), free).seconds == pytest.approx((64 + 3) * each)
    assert pipeline(job(), made).seconds > pipeline(job(), free).seconds


def test_stages_of_a_v_are_laid_out_as_their_schedule_places_them():
    stages = tuple(
        StageEstimate(min(index, 7 - index), 10 * index, 10 * index + 10, 1.0, 1.0, 1.0) for index in range(8)
    )
    layout = replace(CHOSEN, schedule="zb-v", stages=2)
    found = pipeline(job(), replace(best(), layout=layout, stages=stages))
    assert [sorted({span.action.stage for span in rank}) for rank in found.spans] == [[0, 7], [1, 6], [2, 5], [3, 4]]
    assert {span.action.kind for span in found.spans[0]} == {"F", "I", "W"}
