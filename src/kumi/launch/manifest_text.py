"""YAML with comments, from plain data: every value is read back exactly, by any reader of YAML 1.1 or 1.2."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Texts that are written without quotes, unless they are in `_RESERVED`: no reader takes them for a number or a date.
_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*")
# Words that some reader takes for a truth value or null.
_RESERVED = {"y", "n", "yes", "no", "on", "off", "true", "false", "null"}
# Texts without control characters, line breaks other than \n, and the byte order mark.
_PRINTABLE = re.compile("[\n\x20-\x7e\xa0-\u2027\u202a-\ud7ff\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010ffff]*")


@dataclass(frozen=True)
class Noted:
    """A value with a comment, which stands above its key."""

    value: Any
    note: str


class Null:
    """The value null in the YAML text. None, in contrast, leaves its key out of the text."""


NULL = Null()


def manifest_text(documents: Sequence[Mapping[str, Any]], head: str) -> str:
    """Return `documents` as YAML in their order, below the comment `head`. None and empty values are left out."""
    parts = ["\n".join(_mapping(_without_empty(document), "")) for document in documents]
    return "\n".join(f"# {line}" for line in head.splitlines()) + "\n" + "\n---\n".join(parts) + "\n"


def _without_empty(value: Any) -> Any:
    """Return `value` without None and empty tables and lists, at any depth."""
    if isinstance(value, Noted):
        inner = _without_empty(value.value)
        return inner if _is_empty(inner) else Noted(inner, value.note)
    if isinstance(value, Mapping):
        entries = {key: _without_empty(item) for key, item in value.items()}
        return {key: item for key, item in entries.items() if not _is_empty(item)}
    return [_without_empty(item) for item in value] if isinstance(value, list | tuple) else value


def _is_empty(value: Any) -> bool:
    return value is None or value in ([], {})


def _mapping(mapping: Mapping[str, Any], indent: str) -> Iterator[str]:
    """Yield the lines of a table, each behind `indent`."""
    for key, item in mapping.items():
        value, note = (item.value, item.note) if isinstance(item, Noted) else (item, "")
        yield from (f"{indent}# {line}" for line in note.splitlines())
        name = f"{indent}{_scalar(key)}:"
        if isinstance(value, Mapping):
            yield name
            yield from _mapping(value, f"{indent}  ")
        elif isinstance(value, list):
            if all(isinstance(entry, str | int) for entry in value):
                yield f"{name} [{', '.join(map(_scalar, value))}]"
            else:
                yield name
                yield from _items(value, indent)
        elif isinstance(value, str) and _is_block(value):
            yield f"{name} |"
            yield from (f"{indent}  {line}" if line else "" for line in value.split("\n")[:-1])
        else:
            yield f"{name} {_scalar(value)}"


def _items(values: Sequence[Any], indent: str) -> Iterator[str]:
    """Yield the lines of a list of tables. The comment of a table's first key stands above the table's dash."""
    for value in values:
        lines = list(_mapping(value, f"{indent}  "))
        note_count = next(index for index, line in enumerate(lines) if not line.lstrip().startswith("#"))
        yield from (f"{indent}{line[len(indent) + 2 :]}" for line in lines[:note_count])
        yield f"{indent}- {lines[note_count][len(indent) + 2 :]}"
        yield from lines[note_count + 1 :]


def _is_block(text: str) -> bool:
    """Return True for lines that a literal block holds as they are."""
    single_end = text.endswith("\n") and not text.endswith("\n\n") and text != "\n"
    return single_end and not text[0].isspace() and _PRINTABLE.fullmatch(text.replace("\t", "")) is not None


def _scalar(value: str | int | bool | Null) -> str:
    """Return `value` as YAML, a text in quotes if a reader could take it for another kind of value."""
    if isinstance(value, Null):
        return "null"
    if not isinstance(value, str):
        return json.dumps(value)
    if _PLAIN.fullmatch(value) and value.lower() not in _RESERVED:
        return value
    return '"' + "".join(_escape(char) for char in value) + '"'


def _escape(char: str) -> str:
    """Return `char` as YAML writes it between double quotes."""
    if char in '"\\':
        return f"\\{char}"
    if char == "\n":
        return "\\n"
    if char != "\n" and _PRINTABLE.fullmatch(char):
        return char
    code = ord(char)
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" if code < 65536 else f"\\U{code:08x}"
