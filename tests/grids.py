"""Which cases of a grid run by default. The others run with `--all`: they are marked `exhaustive`."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import combinations
from typing import Any

import pytest

Case = Sequence[Hashable]


def sampled(cases: Sequence[Case], kept: Callable[[int], bool], names: Callable[..., str] | None = None) -> list[Any]:
    """`cases` as parameters of a test; by default only those whose place in `cases` is `kept`. `names` makes the
    id of a case from its values."""
    later = pytest.mark.exhaustive
    return [
        pytest.param(*case, id=names(*case) if names else None, marks=() if kept(place) else later)
        for place, case in enumerate(cases)
    ]


def pairwise(cases: Sequence[Case], names: Callable[..., str] | None = None) -> list[Any]:
    """`cases` as parameters of a test; by default as few as show every two values together that any case has."""
    pairs = [set(combinations(enumerate(case), 2)) for case in cases]
    missing, kept = set().union(*pairs), set()
    while missing:
        best = max(range(len(cases)), key=lambda place: len(pairs[place] & missing))
        kept.add(best)
        missing -= pairs[best]
    return sampled(cases, kept.__contains__, names)
