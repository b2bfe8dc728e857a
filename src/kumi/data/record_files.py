"""Files of records: open them within bounds, and split JSONL files into lines."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, cast

from kumi.data.frames import Frames, GzipFrame, ZstdFrame
from kumi.data.sources import compression
from kumi.errors import ConfigError
from kumi.files.untrusted import json_record, open_stream

# The most bytes of a record, and the bytes that are read at a time.
MAX_BYTES = 256 * 2**20
BLOCK = 1 << 20


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
    return open_stream(path, follow=True, buffering=BLOCK)


def record_limit(path: Path) -> int:
    """Return the limit on the bytes of one record of `path`.

    It is 256 MiB. For a compressed file it is 64 times the file's size if that is less, but at least 64 MiB: text
    compresses to about a third, repetitive text to much less, and a larger record is a decompression bomb. A record is
    refused once more bytes of it than the limit are read; reading needs about twice the limit in memory.
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


def lines_before(path: Path, offset: int) -> int:
    """Return the number of lines of an uncompressed file that begin before byte `offset`."""
    if offset == 0:
        return 0
    count, remaining = 0, offset - 1
    with open_stream(path, follow=True) as stream:
        while remaining > 0 and (block := stream.read(min(BLOCK, remaining))):
            count += block.count(b"\n")
            remaining -= len(block)
    return count + 1


def jsonl_lines(path: Path, start: int, end: int | None) -> Iterator[tuple[int, bytes | Fault | None]]:
    """Yield (line, bytes) for each line that begins in the bytes [start, end) of `path`; lines count from the first.

    In place of the bytes, a blank line has None, and a line beyond the limit a Fault. A file in which all lines are
    blank gives one more Fault.
    """
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
                yield line, too_long(file, line, limit)
                continue
            if start == 0 and line == 1:
                raw = raw.removeprefix(b"\xef\xbb\xbf")
            blank = not raw.strip()
            has_records = has_records or not blank
            yield line, None if blank else raw
    if not has_records and start == 0 and end is None:
        yield line, no_record(file)


def parse_record(raw: bytes, file: str, line: int) -> dict[str, Any] | Fault:
    """Return the JSON object `raw` of a line; a Fault if it is not one."""
    try:
        value = json_record(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        return Fault(file, line, "encoding", encoding_reason(raw, error))
    except (ValueError, RecursionError) as error:
        return Fault(file, line, "broken-json", f"not a JSON object: {first_line(error)}")
    return value if isinstance(value, dict) else not_an_object(value, file, line)


def _skip_line(stream: BinaryIO) -> int:
    """Read to the end of the line in bounded memory; return the number of bytes read."""
    skipped = 0
    while block := stream.readline(BLOCK):
        skipped += len(block)
        if block.endswith(b"\n"):
            break
    return skipped


def no_record(file: str) -> Fault:
    """Return the fault of a file without records."""
    return Fault(file, 1, "empty", "the file has no record")


def not_an_object(value: Any, file: str, line: int) -> Fault:
    """Return the fault of a record that is a JSON value of another type than object."""
    return Fault(file, line, "not-an-object", f"a JSON {type(value).__name__} where an object was expected")


def too_long(file: str, line: int, limit: int) -> Fault:
    """Return the fault of a record of more than `limit` bytes."""
    bomb = "" if limit == MAX_BYTES else ", far more than the size of its compressed file suggests"
    return Fault(file, line, "too-long", f"one document of more than {limit >> 20} MiB{bomb}; split it")


def encoding_reason(raw: bytes, error: UnicodeDecodeError) -> str:
    """Return the reason why `raw` is not UTF-8."""
    hint = " (it begins like UTF-16)" if raw[:2] in (b"\xff\xfe", b"\xfe\xff") else ""
    return f"not UTF-8: byte 0x{raw[error.start]:02x} at offset {error.start}{hint}"


def first_line(error: BaseException) -> str:
    """Return the first line of the message of `error`, or the name of its class."""
    return (str(error) or type(error).__name__).splitlines()[0]
