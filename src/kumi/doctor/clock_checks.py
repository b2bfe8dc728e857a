"""Check of clocks: their difference from that of node 0."""

from __future__ import annotations

import time
from collections.abc import Mapping

from kumi.doctor.finding import Fleet, Judgement, Reading
from kumi.doctor.fleet_rules import shorten
from kumi.doctor.here import Here

# The largest difference from the clock of node 0 that passes.
SKEW_SECONDS = 1.0
# Node 0 asks each node so many times, and waits so long for each answer.
_TOPIC, _ROUNDS, _REPLY_SECONDS = "clock", 3, 5.0


def now() -> float:
    """Return the time of this node's clock, in seconds."""
    return time.time()


def clock_skew(here: Here) -> Reading:
    """On node 0, ask each node for its time; return the least possible difference in seconds, signed, by node.

    A node's clock is read at some instant between question and answer, so a difference of up to half that time may be
    no skew, and is left out. Of a few answers the quickest counts.
    """
    meeting = here.meeting
    if not here.several_nodes:
        return Reading(absent="one node")
    if meeting.seat.node != 0:
        meeting.answer(_TOPIC, now, seconds=60.0)
        return Reading(absent="node 0 compares the clocks")
    skews = {str(node): _skew(here, node) for node in meeting.members[1:]}
    return Reading({node: skew for node, skew in skews.items() if skew is not None})


def _skew(here: Here, node: int) -> float | None:
    """Return the least difference between the clock of `node` and this one; None if the node is lost."""
    best: tuple[float, float] | None = None
    for _ in range(_ROUNDS):
        before = now()
        theirs = here.meeting.call(node, _TOPIC, _REPLY_SECONDS)
        after = now()
        if not isinstance(theirs, int | float):
            return None
        sample = (after - before, theirs - (before + after) / 2)
        best = sample if best is None or sample < best else best
    here.meeting.call(node, "end", _REPLY_SECONDS)
    assert best is not None
    duration, difference = best
    certain = max(0.0, abs(difference) - duration / 2)
    return certain if difference > 0 else -certain


def within_skew(readings: Mapping[int, Reading], fleet: Fleet) -> Judgement:
    """No clock differs from that of node 0 by more than `SKEW_SECONDS`."""
    skews = {int(node): skew for reading in readings.values() for node, skew in reading.value.items()}
    limit = f"at most {SKEW_SECONDS:g} s from node 0"
    wrong = [node for node, skew in skews.items() if abs(skew) > SKEW_SECONDS]
    if not wrong:
        return Judgement("ok", f"at most {max(map(abs, skews.values()), default=0.0):.3f} s", limit)
    sides = {node: "ahead of" if skews[node] > 0 else "behind" for node in wrong}
    listed = [f"{fleet.label(node)} is {abs(skews[node]):.1f} s {sides[node]} node 0" for node in wrong]
    return Judgement("fail", shorten(listed), limit, tuple(wrong))
