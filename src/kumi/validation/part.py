"""A part of the validation, what it is told, and the rows that it yields."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

# One line of a part's table: figures by their names, which have the unit, such as "tokens/s" or "GiB".
Value = str | float | int | bool | None
Row = Mapping[str, Value]
Rows = Iterator[Row]

# ok: all rows were measured. skipped: the part does not apply here; the reason says why. failed: an exception.
# crashed: the process died. late: it took longer than its limit. left out: the time for all parts was spent.
Status = Literal["ok", "skipped", "failed", "crashed", "late", "left out"]


class Part(NamedTuple):
    """A part of the validation.

    `function`: "module:name" of a function of a `Setting` that yields rows, which are written as they come.
    `seconds`: the limit of its process.
    `needs`: what it is for, as a sentence of the page.
    """

    name: str
    function: str
    seconds: float
    needs: str


@dataclass(frozen=True)
class Setting:
    """What every part is told.

    `device`: "cuda" (also of ROCm), or "cpu", which tries the parts with tiny sizes.
    `seconds`: the time to spend on one figure.
    """

    device: str
    seconds: float

    @property
    def tiny(self) -> bool:
        """True if the sizes shall be those of a trial on a CPU."""
        return self.device == "cpu"


class Skipped(Exception):
    """A part does not apply here. The text says why."""
