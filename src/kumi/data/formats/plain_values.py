"""Check values of rows that templates and stores get as they are: JSON values of bounded depth, without NaN."""

from __future__ import annotations

import json
import math
from typing import Any

from kumi.data.chat.masked import RowRefused
from kumi.files.untrusted import brief, json_record

# The deepest JSON that `kumi.files.untrusted.Bounds` allows in any file, and the most digits of a whole number there.
_DEPTH = 64
_DIGITS = 40


def check_text(text: str, where: str) -> str:
    """Return `text`. Raise RowRefused if it has half a surrogate pair, which is not a character."""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            letter = f"U+{ord(text[error.start]):04X}"
            raise RowRefused("encoding", f"{where} has half a surrogate pair ({letter})") from None
    return text


def check_plain(value: Any, where: str) -> Any:
    """Return `value`. Raise RowRefused unless it is a JSON value: text, numbers, lists and objects, within bounds."""
    pending = [(value, 1)]
    while pending:
        item, level = pending.pop()
        if isinstance(item, str):
            check_text(item, where)
        elif isinstance(item, dict | list):
            if level > _DEPTH:
                raise RowRefused("too-deep", f"{where} is nested more than {_DEPTH} levels deep")
            if isinstance(item, dict):
                for key in item:
                    if not isinstance(key, str):
                        raise RowRefused("not-json", f"{where} has the key {brief_value(key)}, which is not text")
                    check_text(key, where)
            pending += [(inner, level + 1) for inner in (item.values() if isinstance(item, dict) else item)]
        elif isinstance(item, float):
            if not math.isfinite(item):
                raise RowRefused("not-json", f"{where} has the number {item}, which JSON cannot write")
        elif isinstance(item, int):
            if abs(item) >= 10**_DIGITS:
                raise RowRefused("not-json", f"{where} has a whole number of more than {_DIGITS} digits")
        elif item is not None:
            raise RowRefused("not-json", f"{where} has a value of type {type(item).__name__}, which JSON cannot write")
    return value


def parse_text(text: str, where: str, kind: str) -> Any:
    """Return the value of the JSON text in a column. Raise RowRefused under `kind` if it is broken."""
    try:
        return json_record(text)
    except RecursionError:
        raise RowRefused("too-deep", f"{where} is JSON text that is nested too deeply") from None
    except ValueError as error:
        reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
        raise RowRefused(kind, f"{where} is text that is not valid JSON ({reason}): {brief_value(text)}") from None


def type_name(value: Any) -> str:
    """Return the type of `value` in JSON's words."""
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", int: "a number", float: "a number"}
    return "null" if value is None else names.get(type(value), type(value).__name__)


def brief_value(value: Any) -> str:
    """Return `value` for a reason: a plain value itself, the type of any other, which may be of any depth and size."""
    if isinstance(value, str):
        return brief(value[:61], 60)
    return brief(value, 60) if value is None or isinstance(value, bool | int | float) else type_name(value)
