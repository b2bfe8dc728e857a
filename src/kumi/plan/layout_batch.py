"""Many layouts at once, as arrays: the planner's formulas are written on these, for one layout or for millions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, make_dataclass
from typing import TYPE_CHECKING, Any, ClassVar

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

# Fields of a layout that are columns. What is divided otherwise than evenly is said where stages are looked at.
NAMES = tuple(field.name for field in fields(Layout) if field.name != "stage_layers")

if TYPE_CHECKING:

    class _Columns:
        def __init__(self, **columns: Ints) -> None: ...
        def __getattr__(self, name: str) -> Ints: ...

else:
    _Columns = make_dataclass("_Columns", [(name, Ints) for name in NAMES], frozen=True)


class Columns(_Columns):
    """Many layouts: each field of `Layout` in `NAMES` as an int64 array, all of one length.

    Text is its index in `WORDS`, truth 0 or 1, and None -1.
    """

    # Layers of columns are divided evenly.
    stage_layers: ClassVar[tuple[int, ...]] = ()

    @property
    def recomputes_all(self) -> Bools:
        return self.recompute_layers < 0

    @property
    def dp(self) -> Ints:
        return self.dp_replicate * self.dp_shard

    @property
    def world_size(self) -> Ints:
        return self.pp * self.dp * self.cp * self.tp

    def one_of(self, name: str, words: Sequence[str]) -> Bools:
        """Return whether the field `name`, which holds text, is one of `words`, (rows,)."""
        if len(words) == 1:
            return np.asarray(getattr(self, name) == WORDS[name].index(words[0]))
        matches: Bools = np.array([word in words for word in WORDS[name]])[getattr(self, name)]
        return matches

    def __len__(self) -> int:
        return len(self.pp)

    def each(self, change: Callable[[Ints], Ints]) -> Columns:
        """The same columns, each changed by `change` (a selection, a repetition)."""
        return Columns(**{name: change(getattr(self, name)) for name in NAMES})

    def take(self, index: Any) -> Columns:
        """The rows that `index` (numbers, a mask, a slice) picks."""
        return self.each(lambda column: column[index])

    def replaced(self, **columns: Ints) -> Columns:
        """The same rows with some columns replaced by `columns`."""
        return Columns(**{**vars(self), **columns})

    def row(self, index: int) -> Layout:
        """Row `index` as a layout."""
        return Layout(**{name: _value(name, int(getattr(self, name)[index])) for name in NAMES})


def columns(layouts: Sequence[Layout]) -> Columns:
    """`layouts` as columns."""
    return Columns(**{name: np.array([_code(layout, name) for layout in layouts], np.int64) for name in NAMES})


def joined(parts: Sequence[Columns]) -> Columns:
    """The rows of all `parts`, one after the other."""
    return Columns(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in NAMES})


# What a field holds where a layout does not name it: its type decides how numbers are read.
_DEFAULTS = {field.name: field.default for field in fields(Layout)}


def _code(layout: Layout, name: str) -> int:
    value = getattr(layout, name)
    if name in WORDS:
        return WORDS[name].index(value)
    return -1 if value is None else int(value)


def _value(name: str, code: int) -> Any:
    """The inverse of `_code`."""
    if name in WORDS:
        return WORDS[name][code]
    if isinstance(_DEFAULTS[name], bool):
        return bool(code)
    return None if code < 0 and _DEFAULTS[name] is None else code
