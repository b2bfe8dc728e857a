"""Rules that judge the readings of all nodes: equal values, large enough values, or whatever
each node judges by itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from kumi.doctor.finding import Fleet, Judgement, Reading, Rule

# At most this many nodes are listed in a line.
_LISTED = 6


def same() -> Rule:
    """All nodes have the same value. Nodes whose value is not the most frequent one are named.

    Of equally frequent values, that of the first node counts as the most frequent.
    """

    def rule(readings: Mapping[int, Reading], fleet: Fleet) -> Judgement:
        limit = f"the same on all {fleet.noun}s"
        counts = Counter(_text(reading.value) for reading in readings.values())
        most = max(counts.values())
        common = next(_text(reading.value) for reading in readings.values() if counts[_text(reading.value)] == most)
        different = [node for node, reading in readings.items() if _text(reading.value) != common]
        if not different:
            return Judgement("ok", common, limit)
        listed = [fleet.about(node, _text(readings[node].value)) for node in different]
        return Judgement("fail", f"{shorten(listed)}; the others: {common}", limit, tuple(different))

    return rule


def enough(show: Callable[[float], str]) -> Rule:
    """The value of every node is at least its `need`.

    The line shows the nodes that have too little, or else the value of the one with the least to spare.
    """

    def rule(readings: Mapping[int, Reading], fleet: Fleet) -> Judgement:
        short = [node for node, reading in readings.items() if reading.value < (reading.need or 0)]
        worst = min(readings, key=lambda node: readings[node].value - (readings[node].need or 0))
        limit = f"at least {show(readings[worst].need or 0)}"
        if not short:
            return Judgement("ok", show(readings[worst].value), limit)
        listed = [fleet.about(node, show(readings[node].value)) for node in short]
        return Judgement("fail", shorten(listed), limit, tuple(short))

    return rule


def sound(limit: str) -> Rule:
    """The nodes judge themselves, by their problems and warnings. The line shows their values."""

    def rule(readings: Mapping[int, Reading], fleet: Fleet) -> Judgement:
        texts = {_text(reading.value) for reading in readings.values()}
        if len(texts) == 1:
            return Judgement("ok", texts.pop(), limit)
        listed = [fleet.about(node, _text(reading.value)) for node, reading in readings.items()]
        return Judgement("ok", shorten(listed), limit)

    return rule


def shorten(listed: list[str]) -> str:
    """Return `listed` as text, with only a count of the entries after the first few."""
    more = [f"and {len(listed) - _LISTED} more"] if len(listed) > _LISTED else []
    return "; ".join([*listed[:_LISTED], *more])


def _text(value: Any) -> str:
    return value if isinstance(value, str) else str(value)
