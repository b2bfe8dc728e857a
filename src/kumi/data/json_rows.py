"""Read the objects of a JSON file one at a time: a list of objects, or objects one after another."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kumi.data.record_files import (
    BLOCK,
    Fault,
    first_line,
    no_record,
    not_an_object,
    open_bytes,
    record_limit,
    too_long,
)
from kumi.files.untrusted import json_prefix

_SPACE = re.compile(r"[ \t\r\n]*")
# In a list or an object: a string, a bracket, or the quote of a string that does not end in the buffer.
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*+"|[\[\]{}"]', re.DOTALL)
# What may follow any other value.
_SEPARATOR = re.compile(r"[,\]\n]")
# The longest literal of JSON; at the end of the buffer it may be incomplete.
_LITERAL = 16

# A row's line, or its number in a file without lines, and its columns.
Row = tuple[int, dict[str, Any]]


def json_rows(path: Path) -> Iterator[tuple[int, Row | Fault]]:
    """Yield (row, item) for each object of the JSON file `path`; rows count from 1.

    The file is decoded as it is read: memory is bounded by `record_limit`, not by the file. A broken object is a fault,
    and the next one is read if the brackets show where it begins. Raise ValueError where the file cannot be read on.
    """
    file, row = str(path), 0
    with open_bytes(path) as stream:
        buffer = _Buffer(stream.read, record_limit(path))
        buffer.skip_space()
        is_list = buffer.peek() == "["
        if is_list:
            buffer.position += 1
        while True:
            buffer.skip_space()
            if buffer.peek() == "" or (is_list and buffer.peek() == "]"):
                break
            row += 1
            yield row, _next_item(buffer, file, row)
            buffer.skip_space()
            if is_list and buffer.peek() not in ",]":
                raise ValueError(f"after row {row} comes {buffer.peek()!r}, not a comma")
            if buffer.peek() == ",":
                buffer.position += 1
        if is_list and buffer.peek() != "]":
            raise ValueError("the list has no end: the file is truncated")
        if row == 0:
            yield 0, no_record(file)


def _next_item(buffer: _Buffer, file: str, row: int) -> Row | Fault:
    """Return the next value of `buffer` as a row or a Fault, and go behind it."""
    try:
        value = buffer.decode()
    except OverflowError:
        fault = too_long(file, row, buffer.limit)
    except (ValueError, RecursionError) as error:
        fault = Fault(file, row, "broken-json", f"not a JSON object: {_reason(error)}")
    else:
        return (row, value) if isinstance(value, dict) else not_an_object(value, file, row)
    buffer.skip_value()
    return fault


def _reason(error: Exception) -> str:
    """Return the reason without the position, which would be one in the buffer, not in the file."""
    return error.msg if isinstance(error, json.JSONDecodeError) else first_line(error)


class _Buffer:
    """The part of a file that is decoded at present; `position` is the next character of `text`.

    read: reads bytes, as a file does.
    limit: most characters of one value.
    """

    def __init__(self, read: Callable[[int], bytes], limit: int) -> None:
        self.read, self.limit = read, limit
        self.text, self.position, self.at_end = "", 0, False
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()

    def fill(self) -> bool:
        """Read on, dropping the text before `position`; return False at the end of the file.

        What is read is at least as long as the text that stays, so that a long value is decoded a few times only.
        """
        if self.at_end:
            return False
        raw = self.read(max(BLOCK, len(self.text) - self.position))
        self.at_end = not raw
        try:
            more = self._decoder.decode(raw, self.at_end)
        except UnicodeDecodeError as error:
            raise ValueError(f"not UTF-8: byte 0x{error.object[error.start]:02x}") from None
        self.text, self.position = self.text[self.position :] + more, 0
        return not self.at_end

    def peek(self) -> str:
        """Return the next character, "" at the end of the file."""
        while self.position == len(self.text) and self.fill():
            pass
        return self.text[self.position : self.position + 1]

    def skip_space(self) -> None:
        """Go to the next character that is not white space."""
        while True:
            match = _SPACE.match(self.text, self.position)
            self.position = match.end() if match else self.position
            if self.position < len(self.text) or not self.fill():
                return

    def decode(self) -> Any:
        """Return the value at `position` and go behind it. Raise OverflowError for one beyond the limit."""
        while True:
            try:
                value, end = json_prefix(self.text, self.position)
            except json.JSONDecodeError as error:
                cut_off = error.msg.startswith("Unterminated string") or error.pos >= len(self.text) - _LITERAL
                if not cut_off or not self._fill_below_limit():
                    raise
            else:
                # A number at the end of the buffer may go on.
                if end < len(self.text) or not self._fill_below_limit():
                    self.position = end
                    return value

    def _fill_below_limit(self) -> bool:
        if len(self.text) - self.position > self.limit:
            raise OverflowError
        return self.fill()

    def skip_value(self) -> None:
        """Go behind the broken value at `position`. Raise ValueError if it has no end.

        An object or a list ends where its brackets do, another value before the next comma, bracket or line.
        """
        nested, depth = self.peek() in ("[", "{"), 0
        if not nested:
            self.position += 1
        while True:
            match = (_TOKEN if nested else _SEPARATOR).search(self.text, self.position)
            token = match.group() if match else ""
            if match is None or token == '"':
                # A string begins here and ends later; everything before it is passed over.
                self.position = match.start() if match else len(self.text)
                if len(self.text) - self.position > self.limit or not self.fill():
                    raise ValueError("a broken value has no end")
                continue
            self.position = match.end() if nested else match.start()
            depth += (token in "[{") - (token in "]}")
            if not nested or depth == 0:
                return
