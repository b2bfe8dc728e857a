"""Select the cases of a grid that run by default. The others are marked `exhaustive` and run with `--all`."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import combinations
from typing import Any

import pytest

from kumi.spec.layout import Layout

Case = Sequence[Hashable]


def sampled(
    cases: Sequence[Case], selected: Callable[[int], bool], names: Callable[..., str] | None = None
) -> list[Any]:
    """Return `cases` as test parameters. By default, only cases whose index is `selected` run.

    `names` makes a case's id from its values.
    """
    return [
        pytest.param(*case, id=names(*case) if names else None, marks=() if selected(index) else pytest.mark.exhaustive)
        for index, case in enumerate(cases)
    ]


def pairwise(cases: Sequence[Case], names: Callable[..., str] | None = None) -> list[Any]:
    """Return `cases` as test parameters. By default, a small selection runs that covers all pairs of values in `cases`.

    `names` makes a case's id from its values.
    """
    covering = _covering(cases)
    return sampled(cases, covering.__contains__, names)


def all_pairs(cases: Sequence[Case]) -> list[Case]:
    """Return a small selection of `cases` that covers all pairs of values in them, in their order."""
    return [cases[index] for index in sorted(_covering(cases))]


def _covering(cases: Sequence[Case]) -> set[int]:
    """Return the indices of the selection of `all_pairs`: each next case has the most pairs that are missing."""
    pairs = [set(combinations(enumerate(case), 2)) for case in cases]
    missing, selected = set().union(*pairs), set()
    while missing:
        best = max(range(len(cases)), key=lambda index: len(pairs[index] & missing))
        selected.add(best)
        missing -= pairs[best]
    return selected


def named(layout: Layout) -> str:
    """Return the fields of `layout` that are not the default, for a test's id."""
    return "-".join(f"{key}{value}" for key, value in vars(layout).items() if value != getattr(Layout(), key))
