"""Read the documents of a file: every record becomes either a Record or a Fault, and none is dropped.

Ranges and `line` are those of `kumi.data.row_files`, which reads rows with all their columns."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kumi.data.record_files import (
    BLOCK,
    Fault,
    encoding_reason,
    first_line,
    import_optional,
    jsonl_lines,
    lines_before,
    no_record,
    open_bytes,
    parse_record,
    record_limit,
    too_long,
)
from kumi.data.row_files import read_rows
from kumi.data.sources import DataPathError, file_format
from kumi.errors import ConfigError
from kumi.files.untrusted import open_stream

__all__ = [
    "Fault",
    "Item",
    "Record",
    "import_optional",
    "lines_before",
    "open_bytes",
    "parquet_groups",
    "read",
    "read_range",
    "record_limit",
]


@dataclass(frozen=True, slots=True)
class Record:
    """One document, with its file and line."""

    text: str
    file: str
    line: int


Item = Record | Fault


def read(path: Path | str, fmt: str = "auto", text_key: str = "text") -> Iterator[Item]:
    """Yield all documents and faults of a file, in file order. Raise DataPathError for an unknown suffix."""
    resolved = file_format(Path(path), fmt)
    if resolved is None or resolved == "indexed":
        raise DataPathError(
            f"{path}: its suffix names no known format; set format to jsonl, json, parquet, arrow or text"
        )
    yield from read_range(Path(path), resolved, text_key)


def read_range(
    path: Path, fmt: str, text_key: str, start: int = 0, end: int | None = None
) -> Generator[Item, None, int]:
    """Yield the items of one range of `path`, by default of the full file; return the number of its last line or row.

    `start`, `end`: bytes of a jsonl file, row groups of a parquet file, batches of an arrow file. Other files are read
    as a whole.
    """
    if fmt == "text":
        yield _text(path)
        return 1
    if fmt in ("json", "arrow"):
        return (yield from _texts_of_rows(path, fmt, text_key, start, end))
    reader = _jsonl if fmt == "jsonl" else _parquet
    line = 0
    try:
        lines = reader(path, text_key, start, end)
        while True:
            line, item = next(lines)
            if item is not None:
                yield item
    except StopIteration:
        return line
    except (OSError, EOFError, RuntimeError, ValueError) as error:
        yield Fault(str(path), line + 1, "unreadable", f"cannot be read from here on: {first_line(error)}")
    return line


def parquet_groups(path: Path, text_key: str) -> list[int] | None:
    """Return the number of rows of each row group, or None for an unreadable file.

    Raise ConfigError when the file has no column `text_key` of strings.
    """
    parquet = import_optional("pyarrow.parquet", ".parquet")
    try:
        with open_stream(path, follow=True) as stream, parquet.ParquetFile(stream) as file:
            schema, metadata = file.schema_arrow, file.metadata
            rows = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
    except (OSError, ValueError, import_optional("pyarrow", ".parquet").ArrowException):
        return None
    if text_key not in schema.names:
        raise ConfigError(f"{path}: no column {text_key!r}; it has {', '.join(schema.names)}; set text_key")
    if str(schema.field(text_key).type) not in ("string", "large_string", "string_view", "null"):
        raise ConfigError(f"{path}: column {text_key!r} is {schema.field(text_key).type}, not string; set text_key")
    return rows


def _texts_of_rows(path: Path, fmt: str, key: str, start: int, end: int | None) -> Generator[Item, None, int]:
    """Yield the items of the rows of a JSON or Arrow file; return their number."""
    rows, file = read_rows(path, fmt, [key], start, end), str(path)
    while True:
        try:
            item = next(rows)
        except StopIteration as stop:
            return int(stop.value)
        yield item if isinstance(item, Fault) else _field(item[1], key, file, item[0])


def _text(path: Path) -> Item:
    """Return the text file `path` as one document."""
    try:
        limit = record_limit(path)
        with open_bytes(path) as stream:
            raw = stream.read(limit + 1)
    except (OSError, EOFError) as error:
        return Fault(str(path), 1, "unreadable", f"cannot be read: {first_line(error)}")
    if len(raw) > limit:
        return too_long(str(path), 1, limit)
    try:
        return _to_item(raw.decode("utf-8-sig"), str(path), 1)
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        return Fault(str(path), line, "encoding", encoding_reason(raw, error))


def _jsonl(path: Path, key: str, start: int, end: int | None) -> Iterator[tuple[int, Item | None]]:
    """Yield (line, item) for each line that begins in the bytes [start, end) of `path`; None for a blank line."""
    file = str(path)
    for line, raw in jsonl_lines(path, start, end):
        if isinstance(raw, bytes):
            record = parse_record(raw, file, line)
            yield line, record if isinstance(record, Fault) else _field(record, key, file, line)
        else:
            yield line, raw


def _field(value: dict[str, Any], key: str, file: str, line: int) -> Item:
    """Return the text in field `key` of a record as a Record; a Fault unless it is a text."""
    text = value.get(key)
    if isinstance(text, str):
        return _to_item(text, file, line)
    if text is None:
        present = ", ".join(list(value)[:8]) or "no field"
        state = "is null" if key in value else f"is missing (the record has: {present})"
        return Fault(file, line, "missing-field", f"field {key!r} {state}")
    return Fault(file, line, "not-a-string", f"field {key!r} is of type {type(text).__name__}, not a string")


def _to_item(text: str, file: str, line: int) -> Item:
    """Return `text` as a Record; as a Fault when it is empty or not valid Unicode."""
    if not text or text.isspace():
        return Fault(file, line, "empty", "the text is empty")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            return Fault(file, line, "encoding", f"half a surrogate pair (U+{ord(text[error.start]):04X}) in the text")
    return Record(text, file, line)


def _parquet(path: Path, key: str, start: int, end: int | None) -> Iterator[tuple[int, Item | None]]:
    """Yield (row, item) for each row of the row groups [start, end) of `path`."""
    parquet, file = import_optional("pyarrow.parquet", ".parquet"), str(path)
    # Keep dictionary encoding: one long text may stand for millions of rows, and expanding it would fill memory.
    options = {"read_dictionary": [key], "buffer_size": BLOCK, "pre_buffer": False}
    with open_stream(path, follow=True) as stream, parquet.ParquetFile(stream, **options) as table:
        metadata = table.metadata
        groups = range(start, metadata.num_row_groups if end is None else end)
        row = sum(metadata.row_group(group).num_rows for group in range(start))
        if metadata.num_rows == 0:
            yield 0, no_record(file)
        try:
            for batch in table.iter_batches(batch_size=256, row_groups=list(groups), columns=[key]):
                for value in batch.column(0):
                    item = _value(value, key, file, row + 1)
                    row += 1
                    yield row, item
        except import_optional("pyarrow", ".parquet").ArrowException as error:
            # Some are IndexError or KeyError, which `read_range` does not catch: a row refers to a missing dictionary
            # entry.
            raise ValueError(first_line(error)) from error


def _value(value: Any, key: str, file: str, row: int) -> Item:
    """Return `value`, an Arrow scalar of the column `key`, as a Record; a Fault unless it is a text."""
    try:
        return _field({key: value.as_py()}, key, file, row)
    except UnicodeDecodeError as error:
        return Fault(file, row, "encoding", f"not UTF-8 at byte {error.start}")
