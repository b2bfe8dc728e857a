"""Rules about layouts: a condition on one layout or on arrays of layouts, and the message if it does not hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any

from kumi.spec.layout import Layout

# Scope of a rule: the layout is illegal whatever trains it, or this version's trainer does not support it.
ILLEGAL, UNSUPPORTED = "illegal", "unsupported"


@dataclass(frozen=True)
class LayoutRule:
    """One condition on a layout.

    - `topic`: subject of the rule.
    - `holds(x)`: takes a `Layout` and returns a bool, or takes `kumi.plan.layout_batch.LayoutBatch` and returns an
      array of bools (or one bool for all layouts). It may use only what both have (fields, `dp`, `world_size` and
      `one_of`), and operators with the same meaning for numbers and arrays: no `and`, `or`, `not` or `~` on possible
      arrays.
    - `message(layout)`: the sentence for a layout that breaks the rule.
    - `after`: topics of other rules. This rule is skipped if a rule of one of these topics is broken.
    - `scope`: `ILLEGAL` or `UNSUPPORTED`.
    """

    topic: str
    holds: Callable[[Any], Any]
    message: Callable[[Layout], str]
    after: tuple[str, ...] = ("degrees",)
    scope: str = ILLEGAL


def violations(rules: Iterable[LayoutRule], layout: Layout, scope: str = ILLEGAL) -> list[str]:
    """Return the messages of the `rules` of `scope` that `layout` breaks, in the order of the rules."""
    broken: set[str] = set()
    sentences = []
    for rule in rules:
        if broken.isdisjoint(rule.after) and not rule.holds(layout):
            broken.add(rule.topic)
            sentences += [rule.message(layout)] if rule.scope == scope else []
    return sentences


def is_one_of(name: str, values: Sequence[Any]) -> Callable[[Any], Any]:
    """Return the condition that the field `name`, a text or a number, has one of `values`."""
    if isinstance(values[0], str):
        return lambda x: x.one_of(name, values)
    return lambda x: reduce(or_, (getattr(x, name) == value for value in values))


def all_but(words: Iterable[str], *without: str) -> tuple[str, ...]:
    """Return `words`, except those of `without`."""
    return tuple(word for word in words if word not in without)


def joined_by_or(values: list[int]) -> str:
    """Return `values` as in "1, 2 or 4"."""
    listed = [str(value) for value in values]
    return listed[0] if len(listed) == 1 else f"{', '.join(listed[:-1])} or {listed[-1]}"
