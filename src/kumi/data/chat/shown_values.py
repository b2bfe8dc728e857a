"""Numbers and truth values of tool calls and their results: a rendering must show them, in any spelling."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

from kumi.data.chat.masked import RowRefused

Value: TypeAlias = bool | int | float

_NUMBER = re.compile(r"-?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?", re.ASCII)


def plain_values(value: Any) -> Iterator[Value]:
    """Yield the finite numbers and the truth values in a JSON value."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from plain_values(item)
    elif isinstance(value, bool | int) or (isinstance(value, float) and math.isfinite(value)):
        yield value


def check_values(values: Iterable[Value], text: str, i: int, name: str) -> None:
    """Raise RowRefused unless `text` has each of `values`, those of message `i`, which `name` describes.

    A number may have any spelling of the same value, as 1.0 for 1; a truth value that of JSON or of Python.
    """
    values = list(values)
    if not values:
        return
    words = {word.lower() for word in re.findall(r"\b(?:true|false)\b", text, re.IGNORECASE)}
    written = set(_NUMBER.findall(text))
    # A minus sign may be the text's own, as in "2024-05".
    written |= {number.removeprefix("-") for number in written}
    numbers = set(map(float, written))
    for value in values:
        is_shown = str(value).lower() in words if isinstance(value, bool) else value in numbers or str(value) in written
        if not is_shown:
            raise RowRefused("not-shown", f"message {i + 1}: the template does not show {value!r:.60} of the {name}")
