"""Read the documents of a file: every record becomes either a Record or a Fault, and none is dropped.

A file can be read in ranges. A range of a JSONL file is in bytes and has the lines that begin inside it; a range of a
parquet file is in row groups. `line` counts from 1 (rows in parquet); in a range of a JSONL file it counts from the
range's first line."""

from __future__ import annotations

import io
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast

from kumi.data.frames import Frames, GzipFrame, ZstdFrame
from kumi.data.sources import DataPathError, compression, file_format
from kumi.errors import ConfigError
from kumi.files.untrusted import json_record, open_stream

MAX_BYTES = 256 * 2**20
_BLOCK = 1 << 20


@dataclass(frozen=True, slots=True)
class Record:
    """One document, with its file and line."""

    text: str
    file: str
    line: int


@dataclass(frozen=True, slots=True)
class Fault:
    """An unusable record.

    kind: broken-json, encoding, empty, missing-field, not-a-string, not-an-object, too-long or unreadable.
    reason: an explanation with the offending values.
    """

    file: str
    line: int
    kind: str
    reason: str


Item = Record | Fault


def read(path: Path | str, fmt: str = "auto", text_key: str = "text") -> Iterator[Item]:
    """Yield all documents and faults of a file, in file order. Raise DataPathError for an unknown suffix."""
    resolved = file_format(Path(path), fmt)
    if resolved is None or resolved == "indexed":
        raise DataPathError(f"{path}: its suffix names no known format; set format to jsonl, parquet or text")
    yield from read_range(Path(path), resolved, text_key)


def read_range(
    path: Path, fmt: str, text_key: str, start: int = 0, end: int | None = None
) -> Generator[Item, None, int]:
    """Yield the items of one range of `path`, by default of the full file; return the number of lines read."""
    if fmt == "text":
        yield _text(path)
        return 1
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
        yield Fault(str(path), line + 1, "unreadable", f"cannot be read from here on: {_first_line(error)}")
    return line


def open_bytes(path: Path) -> BinaryIO:
    """Open a stream of the uncompressed bytes of `path`.

    A damaged or truncated .gz or .zst file raises EOFError after its last good bytes.
    """
    kind = compression(path)
    if kind == ".gz":
        return cast(BinaryIO, io.BufferedReader(Frames(path, GzipFrame), 1 << 17))
    if kind == ".zst":
        new_frame = partial(ZstdFrame, import_optional("zstandard", ".zst").ZstdDecompressor())
        return cast(BinaryIO, io.BufferedReader(Frames(path, new_frame), 1 << 17))
    return open_stream(path, follow=True, buffering=_BLOCK)


def record_limit(path: Path) -> int:
    """Return the limit on the bytes of one record of `path`.

    For a compressed file it is 64 times the file's size, at least 64 MiB: text compresses to about a third, repetitive
    text to much less, and a larger record is a decompression bomb. A record is refused once so many bytes of it are
    read; reading needs about twice that memory.
    """
    return min(MAX_BYTES, max(64 * 2**20, 64 * path.stat().st_size)) if compression(path) else MAX_BYTES


def import_optional(module: str, suffix: str) -> Any:
    """Import and return the optional module `module`. Raise ConfigError with the install command if it is missing."""
    try:
        return __import__(module, fromlist=["_"])
    except ImportError as error:
        name = module.split(".")[0]
        raise ConfigError(
            f"reading {suffix} files needs {name}, which is not installed; pip install 'kumi[data]'"
        ) from error


def parquet_groups(path: Path, text_key: str) -> list[int] | None:
    """Return the rows of each row group, or None for an unreadable file.

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


def lines_before(path: Path, offset: int) -> int:
    """Return the number of lines of an uncompressed file that begin before byte `offset`."""
    if offset == 0:
        return 0
    count, remaining = 0, offset - 1
    with open_stream(path, follow=True) as stream:
        while remaining > 0 and (block := stream.read(min(_BLOCK, remaining))):
            count += block.count(b"\n")
            remaining -= len(block)
    return count + 1


def _text(path: Path) -> Item:
    """Return the text file `path` as one document."""
    try:
        limit = record_limit(path)
        with open_bytes(path) as stream:
            raw = stream.read(limit + 1)
    except (OSError, EOFError) as error:
        return Fault(str(path), 1, "unreadable", f"cannot be read: {_first_line(error)}")
    if len(raw) > limit:
        return _too_long(str(path), 1, limit)
    try:
        return _to_item(raw.decode("utf-8-sig"), str(path), 1)
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        return Fault(str(path), line, "encoding", _encoding_reason(raw, error))


def _jsonl(path: Path, key: str, start: int, end: int | None) -> Iterator[tuple[int, Item | None]]:
    """Yield (line, item) for each line that begins in the bytes [start, end) of `path`; None for a blank line."""
    file, line, has_records, limit = str(path), 0, False, record_limit(path)
    with open_bytes(path) as stream:
        position = start
        if start:
            stream.seek(start - 1)
            position = start - 1 + _skip_line(stream)
        while end is None or position < end:
            raw = stream.readline(limit + 1)
            if not raw:
                break
            position, line = position + len(raw), line + 1
            if len(raw) > limit and not raw.endswith(b"\n"):
                position, has_records = position + _skip_line(stream), True
                yield line, _too_long(file, line, limit)
                continue
            if start == 0 and line == 1:
                raw = raw.removeprefix(b"\xef\xbb\xbf")
            blank = not raw.strip()
            has_records = has_records or not blank
            yield line, None if blank else _parse(raw, key, file, line)
    if not has_records and start == 0 and end is None:
        yield line, Fault(file, 1, "empty", "the file has no record")


def _skip_line(stream: BinaryIO) -> int:
    """Read to the end of the line in bounded memory; return the number of bytes read."""
    skipped = 0
    while block := stream.readline(_BLOCK):
        skipped += len(block)
        if block.endswith(b"\n"):
            break
    return skipped


def _parse(raw: bytes, key: str, file: str, line: int) -> Item:
    try:
        value = json_record(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        return Fault(file, line, "encoding", _encoding_reason(raw, error))
    except (ValueError, RecursionError) as error:
        return Fault(file, line, "broken-json", f"not a JSON object: {_first_line(error)}")
    if not isinstance(value, dict):
        return Fault(file, line, "not-an-object", f"a JSON {type(value).__name__} where an object was expected")
    return _field(value, key, file, line)


def _field(value: dict[str, Any], key: str, file: str, line: int) -> Item:
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
    options = {"read_dictionary": [key], "buffer_size": _BLOCK, "pre_buffer": False}
    with open_stream(path, follow=True) as stream, parquet.ParquetFile(stream, **options) as table:
        metadata = table.metadata
        groups = range(start, metadata.num_row_groups if end is None else end)
        row = sum(metadata.row_group(group).num_rows for group in range(start))
        if metadata.num_rows == 0:
            yield 0, Fault(file, 1, "empty", "the file has no record")
        try:
            for batch in table.iter_batches(batch_size=256, row_groups=list(groups), columns=[key]):
                for value in batch.column(0):
                    item = _value(value, key, file, row + 1)
                    row += 1
                    yield row, item
        except import_optional("pyarrow", ".parquet").ArrowException as error:
            # Some of these are IndexError or KeyError: a row refers to a missing dictionary entry.
            raise ValueError(_first_line(error)) from error


def _value(value: Any, key: str, file: str, row: int) -> Item:
    try:
        return _field({key: value.as_py()}, key, file, row)
    except UnicodeDecodeError as error:
        return Fault(file, row, "encoding", f"not UTF-8 at byte {error.start}")


def _too_long(file: str, line: int, limit: int) -> Fault:
    bomb = "" if limit == MAX_BYTES else ", far more than the size of its compressed file suggests"
    return Fault(file, line, "too-long", f"one document of more than {limit >> 20} MiB{bomb}; split it")


def _encoding_reason(raw: bytes, error: UnicodeDecodeError) -> str:
    hint = " (it begins like UTF-16)" if raw[:2] in (b"\xff\xfe", b"\xfe\xff") else ""
    return f"not UTF-8: byte 0x{raw[error.start]:02x} at offset {error.start}{hint}"


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
