"""Rules that judge the readings of all nodes: equal, enough, near the median, or only the nodes' own problems."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

from kumi.doctor.finding import Fleet, Judgement, Reading, Rule

# At most this many nodes are listed in a line.
_LISTED = 6


def same(*, severity: str = "fail") -> Rule:
    """All nodes have the same value. The nodes that differ from most, or from node 0 in a tie, are named."""

    def rule(readings: Mapping[int, Reading], fleet: Fleet) -> Judgement:
        limit = f"the same on all {fleet.noun}s"
        counts = Counter(_text(reading.value) for reading in readings.values())
        most = max(counts.values())
        common = next(_text(reading.value) for reading in readings.values() if counts[_text(reading.value)] == most)
        different = [node for node, reading in readings.items() if _text(reading.value) != common]
        if not different:
            return Judgement("ok", common, limit)
        listed = [fleet.about(node, _text(readings[node].value)) for node in different]
        verdict = "warn" if severity == "warn" else "fail"
        return Judgement(verdict, f"{shorten(listed)}; the others: {common}", limit, tuple(different))  # type: ignore[arg-type]

    return rule


def enough(show: Callable[[float], str]) -> Rule:
    """The value of every node is at least its `need`. The line shows the node with the least."""

    def rule(readings: Mapping[int, Reading], fleet: Fleet) -> Judgement:
        short = [node for node, reading in readings.items() if reading.value < (reading.need or 0)]
        worst = min(readings, key=lambda node: readings[node].value - (readings[node].need or 0))
        limit = f"at least {show(readings[worst].need or 0)}"
        if not short:
            return Judgement("ok", show(readings[worst].value), limit)
        listed = [fleet.about(node, show(readings[node].value)) for node in short]
        return Judgement("fail", shorten(listed), limit, tuple(short))

    return rule


def near_median(show: Callable[[float], str], *, warn: float, fail: float) -> Rule:
    """No rate is more than `fail` below the median of all; one more than `warn` below is a warning.

    The value of a reading maps the parts of a node (its devices, or other nodes) to rates.
    """

    def rule(readings: Mapping[int, Reading], fleet: Fleet) -> Judgement:
        rates = {(node, part): rate for node, reading in readings.items() for part, rate in reading.value.items()}
        middle = median(rates.values())
        limit = f"at most {fail:.0%} below the median {show(middle)}"
        slow = sorted((rate, node, part) for (node, part), rate in rates.items() if rate < (1 - warn) * middle)
        if not slow:
            return Judgement("ok", f"{show(min(rates.values()))} to {show(max(rates.values()))}", limit)
        listed = [
            fleet.about(node, f"{part + ' ' if part else ''}{show(rate)}, {1 - rate / middle:.0%} below the median")
            for rate, node, part in slow
        ]
        verdict = "fail" if slow[0][0] < (1 - fail) * middle else "warn"
        return Judgement(verdict, shorten(listed), limit, tuple(sorted({node for _, node, _ in slow})))  # type: ignore[arg-type]

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
    """Return the list as text, with a count in place of all but its first entries."""
    more = [f"and {len(listed) - _LISTED} more"] if len(listed) > _LISTED else []
    return "; ".join([*listed[:_LISTED], *more])


def _text(value: Any) -> str:
    return value if isinstance(value, str) else str(value)
