"""Split sources into units of work, each with a key that identifies its input and therefore its result.

A unit is a list of segments of one source: many small files, or a range of a large one. The split depends only on the
files, not on the number of workers. Merging the units in order gives all documents in file order."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from operator import add
from pathlib import Path
from typing import Any

from kumi.data import binfile, records
from kumi.data.arrow_rows import TABLES, group_rows
from kumi.data.excluded_rows import excluded_of
from kumi.data.formats import Format, detect_source
from kumi.data.row_list import ListedRow, RowList
from kumi.data.row_path import chat_settings, settings_key
from kumi.data.sampled_blocks import sampled_digest
from kumi.data.sources import DataPathError, compression, expand, file_format
from kumi.data.tokenizer import Tokenizer
from kumi.errors import RefusedError
from kumi.files.untrusted import INDEX, read_object
from kumi.spec.data_source import ChatOptions, Source

# Part of all keys and fingerprints: with another version, all data is prepared again.
FORMAT_VERSION = 1
SIDES = ("train", "validation")
# About the number of units of a preparation, and the bounds of the bytes and the segments of one unit.
_UNITS = 1024
_MIN_BYTES, _MAX_BYTES, _MAX_SEGMENTS = 4 << 20, 128 << 20, 4096


@dataclass(frozen=True)
class File:
    """A file of a source: size in bytes and modification time in nanoseconds at the time of planning.

    blocks: digest of a few blocks of its bytes (see `kumi.data.sampled_blocks`).
    """

    path: str
    format: str
    size: int
    mtime: int
    blocks: str


@dataclass(frozen=True)
class FileRange:
    """A range of a file, in bytes (jsonl), row groups (parquet), record batches (arrow) or documents (indexed).

    end: None for the end of the file.
    bytes: estimated size of the range.
    """

    file: File
    start: int = 0
    end: int | None = None
    bytes: int = 0


@dataclass(frozen=True)
class Unit:
    """Segments of source number `source` that one worker processes as one job.

    held_out: whether they belong to the source's own validation data.
    """

    source: int
    segments: tuple[FileRange, ...]
    held_out: bool = False

    @property
    def bytes(self) -> int:
        return sum(segment.bytes for segment in self.segments)


@dataclass(frozen=True)
class Plan:
    """The input of a preparation: sources with their files, options, and units with their keys.

    files: of each source; the files of its own validation data come last.
    formats: how the rows of each source are read as examples or text.
    chat: the result of `kumi.data.row_path.chat_settings`; None if all sources are text.
    fingerprint: digest of all inputs; plans with the same fingerprint and blocks give identical stores.
    blocks: digest of the blocks of all files; not in the fingerprint, because stores of earlier versions lack it.
    excluded: of each unit and segment, the rows that are left out; empty if no row is.
    """

    sources: tuple[Source, ...]
    files: tuple[tuple[File, ...], ...]
    formats: tuple[Format, ...]
    chat: dict[str, Any] | None
    options: dict[str, Any]
    units: tuple[Unit, ...]
    keys: tuple[str, ...]
    fingerprint: str
    blocks: str
    excluded: tuple[list[list[ListedRow]], ...] = ()


def plan(
    sources: Sequence[Source],
    tokenizer: Tokenizer,
    validation: float,
    add_bos: bool,
    chat: ChatOptions = ChatOptions(),  # noqa: B008
    exclude: RowList | None = None,
) -> Plan:
    """Return the plan for `sources`.

    It depends only on the options, and on the files' names, sizes, times, sampled blocks and first rows.

    exclude: rows to leave out. Raise ConfigError for unusable sources or options.
    """
    contents = [files_and_format(source) for source in sources]
    given, own = [files for files, _, _ in contents], [files for _, files, _ in contents]
    files, formats = tuple(map(add, given, own)), tuple(fmt for _, _, fmt in contents)
    kinds = {fmt.kind for fmt in formats} - {"text"}
    settings = chat_settings(chat, tokenizer, kinds) if kinds else None
    size = unit_bytes(file for group in files for file in group)
    options = {
        "tokenizer": tokenizer.digest,
        "eos": tokenizer.eos_id,
        "bos": tokenizer.bos_id if add_bos else None,
        "validation": validation,
    }
    all_units: list[Unit] = []
    all_options: list[dict[str, Any]] = []
    for number, (source, fmt) in enumerate(zip(sources, formats, strict=True)):
        for held_out, group in ((False, given[number]), (True, own[number])):
            for unit in units(number, list(group), source.text_key, size, fmt.kind, held_out):
                if settings is None or fmt.kind == "text":
                    rows: dict[str, Any] = {"text_key": source.text_key}
                else:
                    rows = {"rows": settings_key(settings, fmt)}
                all_units.append(unit)
                fraction = validation_fraction(source, unit, validation)
                all_options.append(options | rows | {"validation": fraction})
    excluded: list[list[list[ListedRow]]] = []
    if exclude is not None:
        by_segment = iter(excluded_of(exclude, [segment for unit in all_units for segment in unit.segments]))
        excluded = [[next(by_segment) for _ in unit.segments] for unit in all_units]
        for unit_options, listed in zip(all_options, excluded, strict=True):
            unit_options.update({"excluded": listed} if any(listed) else {})
    keys = list(map(unit_key, all_units, all_options))
    inputs = [_listed(source, *group) for source, *group in zip(sources, given, own, strict=True)]
    fingerprint = digest([FORMAT_VERSION, options, inputs, keys])
    keys = [digest([key, blocks_of(unit.segments)]) for key, unit in zip(keys, all_units, strict=True)]
    blocks = digest([file.blocks for group in files for file in group])
    content = (tuple(sources), files, formats, settings, options, tuple(all_units), tuple(keys), fingerprint, blocks)
    return Plan(*content, tuple(excluded))


def blocks_of(segments: Iterable[FileRange]) -> list[str]:
    """Return the digests of blocks of the files of `segments`, each file once."""
    return [blocks for _, blocks in dict.fromkeys((segment.file.path, segment.file.blocks) for segment in segments)]


def plain_segments(segments: Iterable[FileRange]) -> list[dict[str, Any]]:
    """Return `segments` as JSON data for digests; without the digests of blocks, which earlier versions lacked."""
    return [asdict(segment) | {"file": _plain_file(segment.file)} for segment in segments]


def _plain_file(file: File) -> dict[str, Any]:
    return {name: value for name, value in asdict(file).items() if name != "blocks"}


def files_and_format(source: Source) -> tuple[tuple[File, ...], tuple[File, ...], Format]:
    """Return the files of `source`, those of its own validation data, and the format of the rows of both.

    Raise ConfigError for an unusable source.
    """
    files = tuple(files_of(source))
    own = _validation_files(source, files)
    return files, own, detect_source(source, [(Path(file.path), file.format) for file in files + own])


def validation_fraction(source: Source, unit: Unit, fraction: float) -> float:
    """Return the fraction of `unit` that is held out: `fraction`; 0 or 1 if the source has its own validation data."""
    return fraction if source.validation is None else float(unit.held_out)


def _validation_files(source: Source, files: tuple[File, ...]) -> tuple[File, ...]:
    """Return the files of the source's own validation data, if it has any; refuse those that are trained on."""
    if source.validation is None:
        return ()
    own = tuple(files_of(replace(source, path=source.validation)))
    shared = {file.path for file in files} & {file.path for file in own}
    if shared:
        raise DataPathError(
            f"data source {source.path!r}: validation={source.validation!r} names {min(shared)}, which is also trained "
            "on; leave it out of path with exclude, or name other files"
        )
    return own


def _listed(source: Source, files: tuple[File, ...], own: tuple[File, ...]) -> list[Any]:
    """Return the part of the fingerprint for a source; keys that the source does not set are left out."""
    more: dict[str, Any] = {} if source.max is None else {"max": source.max}
    if source.validation is not None:
        more["validation"] = [source.validation, [*map(_plain_file, own)]]
    return [source.path, [*map(_plain_file, files)], *([more] if more else [])]


def files_of(source: Source) -> list[File]:
    """Return the files of `source` with sizes, times and digests of blocks.

    For indexed data the size is the sum, and the time the later one, of the .bin and .idx files.
    """
    files = []
    for path in expand(source):
        fmt = file_format(path, source.format)
        assert fmt is not None
        parts = [p for p in ([path, path.with_suffix(".bin")] if fmt == "indexed" else [path]) if p.exists()]
        stats = [part.stat() for part in parts]
        size, changed = sum(s.st_size for s in stats), max(s.st_mtime_ns for s in stats)
        files.append(File(str(path), fmt, size, changed, sampled_digest(parts)))
    return files


def unit_bytes(files: Iterable[File]) -> int:
    """Return the bytes of a unit: 1/1024 of all files, clamped to 4 to 128 MiB."""
    return min(max(sum(file.size for file in files) // _UNITS, _MIN_BYTES), _MAX_BYTES)


def units(
    source: int, files: list[File], text_key: str, size: int, kind: str = "text", held_out: bool = False
) -> list[Unit]:
    """Return the units of source number `source`: all segments of `files`, in order, in units of about `size` bytes.

    kind: the kind of the rows.
    """
    result: list[Unit] = []
    group: list[FileRange] = []
    group_bytes = 0
    for file in files:
        for segment in _segments(file, text_key, size, kind):
            group.append(segment)
            group_bytes += segment.bytes
            if group_bytes >= size or len(group) >= _MAX_SEGMENTS:
                result.append(Unit(source, tuple(group), held_out))
                group, group_bytes = [], 0
    return [*result, Unit(source, tuple(group), held_out)] if group else result


def unit_key(unit: Unit, options: dict[str, Any]) -> str:
    """Return a digest of the unit's segments and the options."""
    return digest({"version": FORMAT_VERSION, "options": options, "segments": plain_segments(unit.segments)})


def digest(value: Any) -> str:
    """Return the SHA-256 of a JSON value, as hexadecimal digits."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _segments(file: File, text_key: str, size: int, kind: str) -> Iterator[FileRange]:
    """Split `file` into segments of about `size` bytes; compressed and text files are one segment."""
    path = Path(file.path)
    if compression(path) == ".zst":
        records.import_optional("zstandard", ".zst")
    if file.format == "jsonl" and not compression(path) and file.size > size:
        count = file.size // size
        bounds = [file.size * n // count for n in range(count + 1)]
        yield from (FileRange(file, a, b, b - a) for a, b in pairwise(bounds))
    elif file.format in TABLES:
        text = kind == "text" and file.format == "parquet"
        rows = records.parquet_groups(path, text_key) if text else group_rows(path, file.format)
        yield from _row_groups(file, rows, size) if rows else [FileRange(file, bytes=file.size)]
    elif file.format == "indexed":
        documents = binfile.open_file(path.with_suffix("")).document_count
        count = max(1, min(documents, file.size // size))
        bounds = [documents * n // count for n in range(count + 1)]
        yield from (FileRange(file, a, b, file.size // count) for a, b in pairwise(bounds))
    else:
        yield FileRange(file, bytes=file.size)


def _row_groups(file: File, rows: list[int], size: int) -> Iterator[FileRange]:
    """Yield ranges of consecutive row groups of about `size` bytes, assuming that all rows have the same size."""
    total, start, pending = max(sum(rows), 1), 0, 0
    for number, count in enumerate(rows):
        pending += count
        if file.size * pending / total >= size or number == len(rows) - 1:
            yield FileRange(file, start, number + 1, round(file.size * pending / total))
            start, pending = number + 1, 0


def read_unit(folder: Path) -> dict[str, Any] | None:
    """Return the counts of the finished unit in `folder`, or None when it is missing or incomplete."""
    try:
        return read_object(folder, "unit.json", RefusedError, INDEX)
    except RefusedError:
        return None
