"""Many layouts at once, as arrays: the planner's formulas are written on these, for one layout or for millions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kumi.spec.layout import CONTEXT, OFFLOAD, RECOMPUTE, Layout
from kumi.spec.schedules import SCHEDULES

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Numbers = NDArray[Any]
Bools = NDArray[np.bool_]

# Fields of a layout that hold text, with the words that stand for 0, 1, 2 ...
WORDS = {"recompute": RECOMPUTE, "schedule": tuple(SCHEDULES), "offload": OFFLOAD, "context": CONTEXT}


@dataclass(frozen=True)
class Columns:
    """The fields of `Layout` as int64 arrays of one length; text as its index in `WORDS`, truth as 0 or 1.

    `recompute_layers` is -1 where it is None. `stage_layers` has no column: what is divided otherwise than evenly is
    said where stages are looked at.
    """

    pp: Ints
    dp_replicate: Ints
    dp_shard: Ints
    cp: Ints
    tp: Ints
    ep: Ints
    zero: Ints
    microbatch: Ints
    recompute: Ints
    recompute_layers: Ints
    sequence_parallel: Ints
    expert_tp: Ints
    schedule: Ints
    stages: Ints
    offload: Ints
    context: Ints
    tiles: Ints

    @property
    def dp(self) -> Ints:
        return self.dp_replicate * self.dp_shard

    @property
    def world_size(self) -> Ints:
        return self.pp * self.dp * self.cp * self.tp

    def one_of(self, name: str, words: Collection[str]) -> Bools:
        """Return whether the field `name`, which holds text, is one of `words`, (rows,)."""
        if len(words) == 1:
            return np.asarray(getattr(self, name) == WORDS[name].index(*words))
        found: Bools = np.array([word in words for word in WORDS[name]])[getattr(self, name)]
        return found

    def __len__(self) -> int:
        return len(self.pp)

    def each(self, change: Callable[[Ints], Ints]) -> Columns:
        """The same columns, each changed by `change` (a selection, a repetition)."""
        return Columns(*(change(getattr(self, field.name)) for field in fields(self)))

    def take(self, index: Any) -> Columns:
        """The rows that `index` (numbers, a mask, a slice) picks."""
        return self.each(lambda column: column[index])

    def row(self, index: int) -> Layout:
        """Row `index` as a layout."""
        found: dict[str, Any] = {field.name: int(getattr(self, field.name)[index]) for field in fields(self)}
        for name, words in WORDS.items():
            found[name] = words[found[name]]
        found["sequence_parallel"] = bool(found["sequence_parallel"])
        if found["recompute_layers"] < 0:
            found["recompute_layers"] = None
        return Layout(**found)


def columns(layouts: Sequence[Layout]) -> Columns:
    """`layouts` as columns."""
    return Columns(
        *(np.array([_code(layout, field.name) for layout in layouts], np.int64) for field in fields(Columns))
    )


def joined(parts: Sequence[Columns]) -> Columns:
    """The rows of all `parts`, one after the other."""
    return Columns(*(np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(Columns)))


def _code(layout: Layout, name: str) -> int:
    value = getattr(layout, name)
    if name in WORDS:
        return WORDS[name].index(value)
    return -1 if value is None else int(value)
