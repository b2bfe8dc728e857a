"""Every schedule trains as one process does, and does what its list says."""

from functools import cache

import pytest

from kumi.spec.layout import Layout
from layouts.test_layouts import TOLERANCE, close
from ranks import run_ranks
from steps import Trace, train

SCHEDULES = {
    "1f1b": 1, "gpipe": 1, "interleaved": 2, "zb-h1": 1, "zb-h2": 1, "zb-v": 2, "dualpipe": 2,
}  # fmt: skip


@cache
def alone(family: str) -> Trace:
    """What one process sees."""
    return run_ranks(1, train, Layout(), family, 1)[0]


def compare(ranks, layout, family, microbatches):
    wanted = alone(family)
    found: set[str] = set()
    for trace in ranks(layout.world_size, train, layout, family, microbatches):
        assert trace.losses == pytest.approx(wanted.losses, rel=TOLERANCE)
        assert trace.norms == pytest.approx(wanted.norms, rel=TOLERANCE)
        for mine, whole in zip([*trace.grads, trace.params], [*wanted.grads, wanted.params]):
            known = {part.name: part for part in whole}
            assert [part.name for part in mine if not close(part, known[part.name])] == []
        found |= {part.name for part in trace.params}
    assert found == {part.name for part in wanted.params}


def piped(pp, schedule, **rest):
    return Layout(pp=pp, schedule=schedule, stages=SCHEDULES[schedule], **rest)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("pp", [2, 4])
def test_every_schedule(ranks, pp, schedule):
    compare(ranks, piped(pp, schedule), "deep-tied", 12 if schedule in ("dualpipe", "interleaved") else 6)


DATA = {
    "copies": {"dp_replicate": 2},
    "zero1": {"dp_shard": 2, "zero": 1},
    "zero3": {"dp_shard": 2, "zero": 3},
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("data", DATA)
def test_data_axes_beside_it(ranks, schedule, data):
    compare(ranks, piped(2, schedule, **DATA[data]), "deep-tied", 6)
