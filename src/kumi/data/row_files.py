"""Read the rows of a file, with their columns: every record becomes either a row or a Fault, and none is dropped.

A file can be read in ranges. A range of a JSONL file is in bytes and has the lines that begin inside it; a range of a
parquet file is in row groups, one of an Arrow file in record batches; a JSON file is read as a whole. `line` counts
from 1 (rows in all but JSONL); in a range of a JSONL file it counts from the range's first line."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from pathlib import Path

from kumi.data.arrow_rows import table_rows
from kumi.data.json_rows import Row, json_rows
from kumi.data.record_files import Fault, first_line, jsonl_lines, parse_record


def read_rows(
    path: Path, fmt: str, columns: Sequence[str] | None = None, start: int = 0, end: int | None = None
) -> Generator[Row | Fault, None, int]:
    """Yield (line, columns) or a Fault for each record of a range of `path`; return the number of lines read.

    fmt: "jsonl", "json", "parquet" or "arrow".
    columns: names of the columns to read from parquet and Arrow files; None for all. Other files have all.
    """
    line = 0
    if fmt == "jsonl":
        rows = _jsonl_rows(path, start, end)
    else:
        rows = json_rows(path) if fmt == "json" else table_rows(path, fmt, columns, start, end)
    try:
        for line, item in rows:  # noqa: B007
            if item is not None:
                yield item
    except (OSError, EOFError, RuntimeError, ValueError) as error:
        yield Fault(str(path), line + 1, "unreadable", f"cannot be read from here on: {first_line(error)}")
    return line


def _jsonl_rows(path: Path, start: int, end: int | None) -> Iterator[tuple[int, Row | Fault | None]]:
    """Yield (line, row) for each line that begins in the bytes [start, end) of `path`; None for a blank line."""
    file = str(path)
    for line, raw in jsonl_lines(path, start, end):
        if isinstance(raw, bytes):
            record = parse_record(raw, file, line)
            yield line, record if isinstance(record, Fault) else (line, record)
        else:
            yield line, raw
