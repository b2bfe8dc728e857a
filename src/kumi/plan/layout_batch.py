"""A batch of layouts, stored as one array per field.

The planner's formulas take a `LayoutBatch`, so that the same code serves one layout and millions of them.
"""

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

# The values of each text field; an array stores the index of the value.
CHOICES = {"recompute": RECOMPUTE, "schedule": tuple(SCHEDULES), "offload": OFFLOAD, "context": CONTEXT}

# The fields of a layout that are stored as arrays. Functions that support uneven stages take `stage_layers` separately.
COLUMN_NAMES = tuple(field.name for field in fields(Layout) if field.name != "stage_layers")

if TYPE_CHECKING:

    class _Columns:
        def __init__(self, **columns: Ints) -> None: ...
        def __getattr__(self, name: str) -> Ints: ...

else:
    _Columns = make_dataclass("_Columns", [(name, Ints) for name in COLUMN_NAMES], frozen=True)


class LayoutBatch(_Columns):
    """A batch of layouts: an int64 array of shape (rows,) for each field of `Layout` in `COLUMN_NAMES`.

    Each row is one layout. Text is stored as its index in `CHOICES`, a bool as 0 or 1, and None as -1.
    """

    # All layouts of a batch divide the layers evenly among the stages.
    stage_layers: ClassVar[tuple[int, ...]] = ()

    @property
    def recomputes_all(self) -> Bools:
        """True where `recompute` applies to all layers, (rows,)."""
        return self.recompute_layers < 0

    @property
    def dp(self) -> Ints:
        return self.dp_replicate * self.dp_shard

    @property
    def world_size(self) -> Ints:
        return self.pp * self.dp * self.cp * self.tp

    def one_of(self, name: str, words: Sequence[str]) -> Bools:
        """Return whether the text field `name` is one of `words`, (rows,)."""
        if len(words) == 1:
            return np.asarray(getattr(self, name) == CHOICES[name].index(words[0]))
        matches: Bools = np.array([word in words for word in CHOICES[name]])[getattr(self, name)]
        return matches

    def __len__(self) -> int:
        return len(self.pp)

    def map_columns(self, change: Callable[[Ints], Ints]) -> LayoutBatch:
        """Return the batch with `change`, such as a selection of rows, applied to each array."""
        return LayoutBatch(**{name: change(getattr(self, name)) for name in COLUMN_NAMES})

    def take(self, index: Any) -> LayoutBatch:
        """Return the rows that `index` (integers, a mask or a slice) selects."""
        return self.map_columns(lambda column: column[index])

    def replaced(self, **columns: Ints) -> LayoutBatch:
        """Return the same rows with the arrays in `columns` replaced."""
        return LayoutBatch(**{**vars(self), **columns})

    def row(self, index: int) -> Layout:
        """Return row `index` as a `Layout`."""
        return Layout(**{name: _value(name, int(getattr(self, name)[index])) for name in COLUMN_NAMES})


def batch_layouts(layouts: Sequence[Layout]) -> LayoutBatch:
    """Return `layouts` as a batch, one row per layout."""
    return LayoutBatch(
        **{name: np.array([_code(layout, name) for layout in layouts], np.int64) for name in COLUMN_NAMES}
    )


def concat_layouts(batches: Sequence[LayoutBatch]) -> LayoutBatch:
    """Concatenate the rows of `batches`."""
    return LayoutBatch(**{name: np.concatenate([getattr(batch, name) for batch in batches]) for name in COLUMN_NAMES})


# The default of each field; its type decides how a stored number is decoded.
_DEFAULTS = {field.name: field.default for field in fields(Layout)}


def _code(layout: Layout, name: str) -> int:
    """Return the number that stands for the field `name` of `layout`."""
    value = getattr(layout, name)
    if name in CHOICES:
        return CHOICES[name].index(value)
    return -1 if value is None else int(value)


def _value(name: str, code: int) -> Any:
    """Return the field value that `code` stands for: the inverse of `_code`."""
    if name in CHOICES:
        return CHOICES[name][code]
    if isinstance(_DEFAULTS[name], bool):
        return bool(code)
    return None if code < 0 and _DEFAULTS[name] is None else code
