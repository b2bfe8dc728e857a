"""Read the rows of parquet files and of Arrow files, which `datasets` writes, in ranges of row groups or batches.

pyarrow is not a dependency of kumi's core; it is imported when such a file is read."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

from kumi.data.json_rows import Row
from kumi.data.record_files import BLOCK, Fault, first_line, import_optional, no_record
from kumi.files.untrusted import open_stream

# The most rows, and about the most bytes, that are converted to Python at a time.
_BATCH_ROWS, _BATCH_BYTES = 256, 4 << 20
# The beginning of an Arrow file; an Arrow stream begins otherwise.
_FILE_MAGIC = b"ARROW1"
# Formats of files with a schema.
TABLES = ("parquet", "arrow")


def column_names(path: Path, fmt: str) -> list[str]:
    """Return the names of the columns of a file of one of the `TABLES`; [] for an unreadable file."""
    try:
        if fmt == "arrow":
            return list(next(_open_arrow(path)).schema.names)
        with (
            open_stream(path, follow=True) as stream,
            import_optional("pyarrow.parquet", fmt).ParquetFile(stream) as file,
        ):
            return list(file.schema_arrow.names)
    except (OSError, ValueError, MemoryError, StopIteration, import_optional("pyarrow", fmt).ArrowException):
        return []


def group_rows(path: Path, fmt: str) -> list[int] | None:
    """Return the number of rows of each row group ("parquet") or record batch ("arrow"); None if it is unreadable."""
    try:
        if fmt == "arrow":
            return [batch.num_rows for batch in _open_arrow(path)]
        with (
            open_stream(path, follow=True) as stream,
            import_optional("pyarrow.parquet", fmt).ParquetFile(stream) as file,
        ):
            return [file.metadata.row_group(group).num_rows for group in range(file.metadata.num_row_groups)]
    except (OSError, ValueError, MemoryError, import_optional("pyarrow", fmt).ArrowException):
        return None


def table_rows(
    path: Path, fmt: str, columns: Sequence[str] | None, start: int, end: int | None
) -> Iterator[tuple[int, Row | Fault]]:
    """Yield (row, item) for each row of the row groups or record batches [start, end) of `path`; rows count from 1.

    `end` None is the end of the file. Keys of structs whose value is None are left out, because the schema of a file
    has the keys of all its rows; below a field "arguments" they stay, because None may be meant there. Dates and
    decimals are text. Raise ValueError where the file cannot be read on.
    """
    file, empty = str(path), True
    read = _arrow_batches if fmt == "arrow" else _parquet_batches
    try:
        for first, batch in read(path, columns, start, end):
            for row, item in enumerate(_batch_rows(batch, file, first), first):
                empty = False
                yield row, item
    except (MemoryError, import_optional("pyarrow", fmt).ArrowException) as error:
        # Some Arrow errors are IndexError or KeyError, not ValueError: a row refers to a missing dictionary entry.
        raise ValueError(first_line(error)) from error
    if empty and start == 0 and end is None:
        yield 0, no_record(file)


def _parquet_batches(
    path: Path, columns: Sequence[str] | None, start: int, end: int | None
) -> Iterator[tuple[int, Any]]:
    """Yield (number of the first row, record batch) for the row groups [start, end) of a parquet file."""
    parquet = import_optional("pyarrow.parquet", ".parquet")
    with (
        open_stream(path, follow=True) as stream,
        parquet.ParquetFile(stream, buffer_size=BLOCK, pre_buffer=False) as table,
    ):
        metadata = table.metadata
        groups = [metadata.row_group(n) for n in range(metadata.num_row_groups if end is None else end)]
        row = 1 + sum(group.num_rows for group in groups[:start])
        names = None if columns is None else [name for name in columns if name in table.schema_arrow.names]
        rows = _batch_length(groups[start:])
        for batch in table.iter_batches(batch_size=rows, row_groups=list(range(start, len(groups))), columns=names):
            yield row, batch
            row += batch.num_rows


def _batch_length(groups: Sequence[Any]) -> int:
    """Return the number of rows with about 4 MiB of values, at most 256."""
    size: int = sum(group.total_byte_size for group in groups)
    rows: int = sum(group.num_rows for group in groups)
    return max(1, min(_BATCH_ROWS, rows * _BATCH_BYTES // max(size, 1)))


def _arrow_batches(path: Path, columns: Sequence[str] | None, start: int, end: int | None) -> Iterator[tuple[int, Any]]:
    """Yield (number of the first row, part of a batch) for the record batches [start, end) of an Arrow file."""
    row = 1
    for number, batch in enumerate(islice(_open_arrow(path), end)):
        if number >= start:
            names = None if columns is None else [name for name in columns if name in batch.schema.names]
            part = batch if names is None else batch.select(names)
            # Without this, an offset beyond the end of a buffer would read foreign memory.
            part.validate(full=True)
            yield from ((row + n, part.slice(n, _BATCH_ROWS)) for n in range(0, part.num_rows, _BATCH_ROWS))
        row += batch.num_rows


def _open_arrow(path: Path) -> Iterator[Any]:
    """Open the record batches of an Arrow stream or file; batches that are not used are not read from the disk."""
    pyarrow = import_optional("pyarrow", ".arrow")
    with open_stream(path, follow=True) as stream:
        if not stream.peek(1):
            raise ValueError("the file is empty")
        # Never closed by hand: batches point into it, and the last of them frees it.
        mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    buffer = pyarrow.BufferReader(pyarrow.py_buffer(mapped))
    if mapped[: len(_FILE_MAGIC)] == _FILE_MAGIC:
        reader = pyarrow.ipc.open_file(buffer)
        return (reader.get_batch(number) for number in range(reader.num_record_batches))
    return iter(pyarrow.ipc.open_stream(buffer))


def _batch_rows(batch: Any, file: str, first: int) -> Iterator[Row | Fault]:
    """Yield the rows of `batch`, numbered from `first`; a row with text that is not UTF-8 is a Fault."""
    names = batch.schema.names
    try:
        columns = [_values(column) for column in batch.columns]
    except UnicodeDecodeError as error:
        if batch.num_rows == 1:
            yield Fault(file, first, "encoding", f"not UTF-8 at byte {error.start}")
            return
        for number in range(batch.num_rows):
            yield from _batch_rows(batch.slice(number, 1), file, first + number)
        return
    if not columns:
        yield from ((row, {}) for row in range(first, first + batch.num_rows))
        return
    for row, values in enumerate(zip(*columns, strict=True), first):
        yield row, dict(zip(names, values, strict=True))


def _values(array: Any, keep_none: bool = False) -> list[Any]:
    """Return the values of an Arrow array as Python values. `keep_none`: structs keep keys whose value is None."""
    types = import_optional("pyarrow", ".arrow").types
    kind = array.type
    if types.is_struct(kind):
        return _structs(array, keep_none)
    if types.is_list(kind) or types.is_large_list(kind):
        offsets = array.offsets.to_pylist()
        items = _values(array.values.slice(offsets[0], offsets[-1] - offsets[0]), keep_none) if offsets else []
        lists = [items[a - offsets[0] : b - offsets[0]] for a, b in pairwise(offsets)]
        return _with_nulls(array, lists)
    if types.is_temporal(kind) or types.is_decimal(kind):
        return list(array.cast("string").to_pylist())
    return list(array.to_pylist())


def _structs(array: Any, keep_none: bool) -> list[Any]:
    """Return the values of an array of structs as dicts, None for null; without keys whose value is None by default."""
    names = [array.type.field(number).name for number in range(array.type.num_fields)]
    # `field` ignores the offset of a slice, `flatten` does not; it also gives None where the struct is null.
    columns = [
        _values(child, keep_none or name == "arguments") for name, child in zip(names, array.flatten(), strict=True)
    ]
    if not columns:
        return _with_nulls(array, [{} for _ in range(len(array))])
    rows = zip(*columns, strict=True)
    if keep_none:
        return _with_nulls(array, [dict(zip(names, row, strict=True)) for row in rows])
    structs = [{name: value for name, value in zip(names, row, strict=True) if value is not None} for row in rows]
    return _with_nulls(array, structs)


def _with_nulls(array: Any, values: list[Any]) -> list[Any]:
    """Return `values`, with None where `array` is null."""
    if not array.null_count:
        return values
    return [value if valid else None for value, valid in zip(values, array.is_valid().to_pylist(), strict=True)]
