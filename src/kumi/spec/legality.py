"""Rules that layouts keep: one condition each, for one layout or millions, and the sentence of who breaks it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from kumi.spec.layout import Layout


@dataclass(frozen=True)
class Rule:
    """One condition on a layout.

    `holds(x)` takes a `Layout` and returns a bool, or takes `kumi.plan.columns.Columns` and returns an array of them
    (or one bool for all rows). So it uses what both have: fields, `dp`, `world_size` and `one_of`, and operators that
    mean the same for numbers and arrays: no `and`, `or`, `not` or `~` on what may be an array. `say(layout)` is the
    sentence of a layout that breaks it. Rules `about` one thing belong together; `after` names what must be in order
    before this rule is judged: nothing is said where one of those is broken.
    """

    about: str
    holds: Callable[[Any], Any]
    say: Callable[[Layout], str]
    after: tuple[str, ...] = ("degrees",)


def broken(rules: Iterable[Rule], layout: Layout) -> list[str]:
    """Return the sentences of the `rules` that `layout` breaks, in their order."""
    wrong: dict[str, list[str]] = {}
    for rule in rules:
        if any(name in wrong for name in rule.after) or rule.holds(layout):
            continue
        wrong.setdefault(rule.about, []).append(rule.say(layout))
    return [sentence for sentences in wrong.values() for sentence in sentences]


def choices(values: list[int]) -> str:
    """Return `values` as in "1, 2 or 4"."""
    listed = [str(value) for value in values]
    return listed[0] if len(listed) == 1 else f"{', '.join(listed[:-1])} or {listed[-1]}"
