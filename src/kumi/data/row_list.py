"""Lists of rows to leave out of a preparation: JSONL with a file, a line and perhaps a digest of the row's text."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kumi.errors import ConfigError
from kumi.files.output import open_new
from kumi.files.untrusted import json_record, open_stream

# A line of a file, and the digest of the row's text or "" where the list has none.
ListedRow = tuple[int, str]


@dataclass(frozen=True)
class RowList:
    """Listed rows, by the absolute path of their file, in the order of lines. path: that of the list itself."""

    path: str
    rows: Mapping[str, Sequence[ListedRow]]


def read_row_list(path: Path | str) -> RowList:
    """Return the list in `path`; of a row that is listed twice, the last entry. Raise ConfigError for a wrong line."""
    rows: dict[str, dict[int, str]] = {}
    try:
        with open_stream(Path(path), follow=True) as stream:
            for number, raw in enumerate(stream, 1):
                if raw.strip():
                    _add_row(rows, raw, f"{path}:{number}")
    except OSError as error:
        raise ConfigError(f"{path}: the list of rows to leave out cannot be read ({error.strerror})") from error
    return RowList(str(path), {file: sorted(lines.items()) for file, lines in rows.items()})


def _add_row(rows: dict[str, dict[int, str]], raw: bytes, place: str) -> None:
    """Add the entry in the line `raw` to `rows`. Raise ConfigError if the line, which is at `place`, has none."""
    try:
        value: Any = json_record(raw.decode())
        file, line, digest = value["file"], value["line"], value.get("digest") or ""
        if not (isinstance(file, str) and type(line) is int and line >= 1 and isinstance(digest, str)):
            raise ValueError("file must be text, and line a number of at least 1")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f'{place}: not a row of a list, such as {{"file": "/data/chats.jsonl", "line": 7}} ({error}); write the '
            "list with kumi data check --write"
        ) from error
    rows.setdefault(str(Path(file).absolute()), {})[line] = digest


def write_row_list(path: Path | str, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write `rows`, with "file", "line" and "digest" at least, as a list."""
    with open_new(Path(path)) as out:
        for row in rows:
            out.write(json.dumps(dict(row), ensure_ascii=False) + "\n")
