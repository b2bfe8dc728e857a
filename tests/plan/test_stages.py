import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from kumi.plan.layout_batch import batch_layouts
from kumi.plan.pipeline.stages import balance_stages, rank_stages
from kumi.spec.layout import Layout
from kumi.spec.model import MLP, Attention, LayerSpec, ModelSpec, Rope
from kumi.spec.schedule import actions, stage_assignment
from kumi.spec.schedules import SCHEDULES
from kumi.spec.sharding import stage_bounds

WIDE = LayerSpec(Attention(4, 2, 16, Rope(10000.0)), MLP(256))
SLIM = LayerSpec(Attention(4, 2, 16, Rope(10000.0)), MLP(128))


def model(layers):
    return ModelSpec("llama", 256, 64, tuple(layers), 1e-5, 128)


def sizes(layers, layout):
    return [last - first for first, last in stage_bounds(layout, layers)]


@pytest.mark.parametrize(
    ("layers", "stages", "expected"),
    [
        (8, 4, [2, 2, 2, 2]),
        (9, 4, [2, 3, 2, 2]),
        (10, 4, [2, 3, 3, 2]),
        (11, 4, [3, 3, 3, 2]),
        (6, 8, [0, 1, 1, 1, 1, 1, 1, 0]),
        (7, 8, [1, 1, 1, 1, 1, 1, 1, 0]),
        (3, 2, [2, 1]),
    ],
)
def test_remaining_layers_go_to_inner_stages_first_and_never_to_the_last(layers, stages, expected):
    assert sizes(layers, Layout(pp=stages)) == expected


def test_llama_3_405b_has_126_layers_on_128_stages_the_first_and_last_of_which_have_none():
    result = sizes(126, Layout(pp=16, stages=8, schedule="interleaved"))
    assert result == [0, *[1] * 126, 0]


def test_given_stages_are_taken_as_they_are():
    assert stage_bounds(Layout(pp=3, stage_layers=(1, 5, 0)), 6) == ((0, 1), (1, 6), (6, 6))


@given(
    some.sampled_from(sorted(SCHEDULES)),
    some.integers(1, 6),
    some.integers(2, 4),
    some.lists(some.booleans(), min_size=24, max_size=30),
)
def test_rank_stages_are_the_sum_of_the_stages_of_each_rank(schedule, pp, stages, wide):
    stages = stages if SCHEDULES[schedule].more_stages else SCHEDULES[schedule].stages
    layout, m = Layout(pp=pp, schedule=schedule, stages=stages), 4 * pp
    for layers in ([SLIM] * len(wide), [WIDE if flag else SLIM for flag in wide]):
        spec = model(layers)
        check_rank_stages(spec, layout, m, ())
        check_rank_stages(spec, layout, m, uneven(len(layers), pp * stages))


def uneven(layers, stages):
    """Return an uneven division: as many layers as possible on the second stage."""
    return (1, layers - stages + 1, *[1] * (stages - 2)) if stages > 1 else (layers,)


def test_a_step_of_few_microbatches_has_no_more_in_flight():
    for schedule, stages in (("1f1b", 1), ("gpipe", 1), ("interleaved", 3), ("zb-h1", 1), ("zb-h2", 1), ("zb-v", 2)):
        for pp in (2, 3, 6):
            for m in range(pp if schedule == "interleaved" else 1, 3 * pp, pp if schedule == "interleaved" else 1):
                check_rank_stages(model([SLIM] * 18), Layout(pp=pp, schedule=schedule, stages=stages), m, ())


def check_rank_stages(spec, layout, m, stage_layers):
    kinds, of_layer = spec.unique_layers()
    limits = stage_bounds(Layout(**{**vars(layout), "stage_layers": stage_layers}), spec.num_hidden_layers)
    layouts = batch_layouts([layout] * layout.pp)
    result = rank_stages(spec, layouts, np.arange(layout.pp), np.full(layout.pp, m), stage_layers)
    for rank, own in enumerate(stage_assignment(layout.schedule, layout.pp, layout.stages)):
        mine = [of_layer[index] for stage in own for index in range(*limits[stage])]
        assert [mine.count(kind) for kind in range(len(kinds))] == result.layers[:, rank].tolist()
        assert result.embedding[rank] == (0 in own)
        assert result.head[rank] == (layout.pp * layout.stages - 1 in own)
        listed = actions(layout.schedule, layout.pp, layout.stages, m)[rank]
        assert result.in_flight[rank] == pytest.approx(alive(listed) / layout.stages)


def alive(listed):
    """Return the peak number of (stage, microbatch) pairs with activations."""
    now = most = 0
    for action in listed:
        now += action.kind == "F"
        most = max(most, now)
        now -= action.kind in "BW"
    return most


def test_rows_may_have_different_layouts():
    layouts = [
        Layout(),
        Layout(pp=4),
        Layout(pp=2, stages=3, schedule="interleaved"),
        Layout(pp=2, stages=2, schedule="zb-v"),
    ]
    result = rank_stages(
        model([SLIM, WIDE] * 6), batch_layouts(layouts), np.array([0, 3, 1, 0]), np.array([4, 4, 4, 4])
    )
    assert result.layers.tolist() == [[6, 1, 3, 3], [6, 2, 3, 3]]
    assert result.embedding.tolist() == [1, 0, 0, 1]
    assert result.head.tolist() == [1, 1, 1, 1]
    assert result.in_flight.tolist() == [1, 1, 5 / 3, 2]


@given(
    some.lists(some.integers(1, 9), min_size=3, max_size=8),
    some.integers(1, 5),
    some.integers(0, 20),
    some.integers(0, 20),
)
def test_balanced_stages_are_the_best_of_all(costs, stages, first, last):
    stages = min(stages, len(costs))
    result = balance_stages(costs, stages, first, last)
    assert sum(result) == len(costs)
    assert dearest(costs, result, first, last) == min(
        dearest(costs, division, first, last) for division in divisions(len(costs), stages)
    )


def dearest(costs, division, first, last):
    ends = np.cumsum(division)
    sums = [sum(costs[end - size : end]) for end, size in zip(ends, division, strict=True)]
    sums[0] += first
    sums[-1] += last
    return max(sums)


def divisions(layers, stages, number=0):
    """Yield every division of `layers` with only the first and the last stage empty, if any."""
    if number == stages - 1:
        yield (layers,)
        return
    for size in range(number > 0, layers + 1):
        for rest in divisions(layers - size, stages, number + 1):
            if stages - number == 2 or all(rest[:-1]):
                yield (size, *rest)


def test_a_heavy_head_lightens_the_last_stage_and_equal_layers_stay_even():
    assert balance_stages([1.0] * 8, 4) == (2, 2, 2, 2)
    assert balance_stages([1.0] * 13, 4, first_extra=0.1, last_extra=2.4) == (4, 4, 4, 1)
    assert balance_stages([1.0] * 78, 12, first_extra=0.0, last_extra=1.0) == (6, 6, 6, 6, 6, 7, 7, 7, 7, 7, 7, 6)
