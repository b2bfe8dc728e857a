"""Rules that layouts keep: one condition each, for one layout or millions, and the sentence of who breaks it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any

from kumi.spec.layout import Layout

# What a rule is about: whether a layout is legal, whoever trains it, or whether this version's trainer takes it.
ILLEGAL, UNTRAINED = "illegal", "untrained"


@dataclass(frozen=True)
class Rule:
    """One condition on a layout.

    `holds(x)` takes a `Layout` and returns a bool, or a `kumi.plan.layout_batch.LayoutBatch` and returns an array of
    them (or one bool for all rows). So it uses what both have: fields, `dp`, `world_size` and `one_of`, and operators
    that mean the same for numbers and arrays: no `and`, `or`, `not` or `~` on what may be an array. `say(layout)` is
    the sentence of a layout that breaks it. `about` names what the rule is about, and `after` what must be in order
    before it is judged: nothing is said where a rule about one of these is broken.
    """

    about: str
    holds: Callable[[Any], Any]
    say: Callable[[Layout], str]
    after: tuple[str, ...] = ("degrees",)
    scope: str = ILLEGAL


def broken(rules: Iterable[Rule], layout: Layout, scope: str = ILLEGAL) -> list[str]:
    """Return the sentences of the `rules` of `scope` that `layout` breaks, in their order."""
    wrong: set[str] = set()
    sentences = []
    for rule in rules:
        if wrong.isdisjoint(rule.after) and not rule.holds(layout):
            wrong.add(rule.about)
            sentences += [rule.say(layout)] if rule.scope == scope else []
    return sentences


def allows(name: str, values: Sequence[Any]) -> Callable[[Any], Any]:
    """Return the condition that the field `name`, which holds text or a number, is one of `values`."""
    if isinstance(values[0], str):
        return lambda x: x.one_of(name, values)
    return lambda x: reduce(or_, (getattr(x, name) == value for value in values))


def others(words: Iterable[str], *without: str) -> tuple[str, ...]:
    """Return `words` without some."""
    return tuple(word for word in words if word not in without)


def choices(values: list[int]) -> str:
    """Return `values` as in "1, 2 or 4"."""
    listed = [str(value) for value in values]
    return listed[0] if len(listed) == 1 else f"{', '.join(listed[:-1])} or {listed[-1]}"
