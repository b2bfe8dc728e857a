import json

import pytest
from examples import timeline

from kumi.report.pipeline_picture import draw_measured_and_planned
from kumi.report.trace import trace


def events(traced, phase="X"):
    return [event for event in traced["traceEvents"] if event["ph"] == phase]


def test_every_action_is_an_event_of_its_rank_in_microseconds():
    made = timeline(8)
    traced = json.loads(json.dumps(trace(made), allow_nan=False))
    assert len(events(traced)) == sum(map(len, made.spans)) == 4 * 2 * 8
    for rank, spans in enumerate(made.spans):
        own = [event for event in events(traced) if event["pid"] == rank]
        assert [event["ts"] for event in own] == pytest.approx([1e6 * span.start for span in spans])
        assert [event["name"] for event in own] == [f"{span.action.kind}{span.action.microbatch}" for span in spans]
        assert {event["args"]["stage"] for event in own} == {rank}
    assert max(event["ts"] + event["dur"] for event in events(traced)) == pytest.approx(1e6 * made.seconds)


def test_what_was_planned_stands_below_what_was_measured():
    measured, planned = timeline(4), timeline(8)
    traced = trace(measured, planned)
    assert events(traced)[: 4 * 2 * 4] == events(trace(measured))
    below = [{**event, "pid": event["pid"] - 4, "tid": event["tid"] - 4} for event in events(traced)[4 * 2 * 4 :]]
    assert below == events(trace(planned))
    named = [event["args"]["name"] for event in events(traced, "M") if event["name"] == "process_name"]
    assert named == [f"{called} {rank}" for called in ("pp rank", "planned pp rank") for rank in range(4)]


@pytest.mark.parametrize("planned", [None, timeline(8)], ids=["alone", "beside"])
def test_the_picture_of_both_has_a_box_for_every_action(planned):
    measured = timeline(4)
    drawn = draw_measured_and_planned(measured, planned, "pipeline")
    actions = 4 * 2 * 4 + (0 if planned is None else 4 * 2 * 8)
    assert drawn.count("microbatch ") == actions
    assert drawn.count(">rank 3<") == (1 if planned is None else 2)
    assert ("planned: " in drawn) == (planned is not None)


def test_ranks_have_names_and_order():
    named = events(trace(timeline()), "M")
    assert [event["args"]["name"] for event in named if event["name"] == "process_name"] == [
        f"pp rank {rank}" for rank in range(4)
    ]
    assert {event["name"] for event in named} == {"process_name", "process_sort_index", "thread_name"}


def test_a_rank_with_several_stages_says_which():
    traced = trace(timeline(8, "zb-v", 2))
    named = [event["args"]["name"] for event in events(traced, "M") if event["name"] == "thread_name"]
    assert named == ["stages 0, 7", "stages 1, 6", "stages 2, 5", "stages 3, 4"]
    assert {event["cat"] for event in events(traced)} == {"forward", "backward (inputs)", "backward (weights)"}
