"""The cutting of sources into units of work, each with a key that names its exact input and result.

A unit is a list of segments of one source: many small files, or a part of a large one. The cut depends on the files
alone, never on the number of workers; joined in order the units give every document in the order of files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from kumi.data import binfile, records
from kumi.data.sources import compression, expand, file_format
from kumi.data.tokenizer import Tokenizer
from kumi.errors import RefusedError
from kumi.files.untrusted import INDEX, read_object
from kumi.spec.source import Source

FORMAT_VERSION = 1
SIDES = ("train", "validation")
_UNITS = 1024
_MIN_BYTES, _MAX_BYTES, _MAX_SEGMENTS = 4 << 20, 128 << 20, 4096


@dataclass(frozen=True)
class File:
    """A file of a source as it was found; size in bytes, time in nanoseconds."""

    path: str
    format: str
    size: int
    mtime: int


@dataclass(frozen=True)
class Segment:
    """A range of a file: bytes (jsonl), row groups (parquet), documents (indexed) or all of it (end None)."""

    file: File
    start: int = 0
    end: int | None = None
    bytes: int = 0


@dataclass(frozen=True)
class Unit:
    """Segments of source number `source`, done by one worker in one go."""

    source: int
    segments: tuple[Segment, ...]

    @property
    def bytes(self) -> int:
        return sum(segment.bytes for segment in self.segments)


@dataclass(frozen=True)
class Plan:
    """Everything that decides the result: sources with their files, options, and the units with their keys."""

    sources: tuple[Source, ...]
    files: tuple[tuple[File, ...], ...]
    options: dict[str, Any]
    units: tuple[Unit, ...]
    keys: tuple[str, ...]
    fingerprint: str


def plan(sources: Sequence[Source], tokenizer: Tokenizer, validation: float, add_bos: bool) -> Plan:
    """The plan for these sources: pure, from the files' names, sizes and times."""
    files = tuple(tuple(files_of(source)) for source in sources)
    size = unit_bytes(file for group in files for file in group)
    options = {
        "tokenizer": tokenizer.digest,
        "eos": tokenizer.eos_id,
        "bos": tokenizer.bos_id if add_bos else None,
        "validation": validation,
    }
    keys, cut = [], []
    for number, (source, group) in enumerate(zip(sources, files, strict=True)):
        for unit in units(number, list(group), source.text_key, size):
            cut.append(unit)
            keys.append(unit_key(unit, options | {"text_key": source.text_key}))
    listed = [[source.path, [asdict(file) for file in group]] for source, group in zip(sources, files, strict=True)]
    print_ = digest([FORMAT_VERSION, options, listed, keys])
    return Plan(tuple(sources), files, options, tuple(cut), tuple(keys), print_)


def files_of(source: Source) -> list[File]:
    """The files of a source with their sizes and times; for indexed data size and time cover both files of the
    pair."""
    found = []
    for path in expand(source):
        fmt = file_format(path, source.format)
        assert fmt is not None
        stats = [p.stat() for p in ([path, path.with_suffix(".bin")] if fmt == "indexed" else [path]) if p.exists()]
        found.append(File(str(path), fmt, sum(s.st_size for s in stats), max(s.st_mtime_ns for s in stats)))
    return found


def unit_bytes(files: Iterable[File]) -> int:
    """The size of a unit: about a thousandth of everything, within 4 to 128 MiB."""
    return min(max(sum(file.size for file in files) // _UNITS, _MIN_BYTES), _MAX_BYTES)


def units(source: int, files: list[File], text_key: str, size: int) -> list[Unit]:
    """Units of about `size` bytes that hold every segment of `files` once, in order."""
    result: list[Unit] = []
    group: list[Segment] = []
    held = 0
    for file in files:
        for segment in _segments(file, text_key, size):
            group.append(segment)
            held += segment.bytes
            if held >= size or len(group) >= _MAX_SEGMENTS:
                result.append(Unit(source, tuple(group)))
                group, held = [], 0
    return [*result, Unit(source, tuple(group))] if group else result


def unit_key(unit: Unit, options: dict[str, Any]) -> str:
    """A name for the unit's result that changes with its files, its cut and the options."""
    return digest({"version": FORMAT_VERSION, "options": options, "segments": [asdict(s) for s in unit.segments]})


def digest(value: Any) -> str:
    """SHA-256 of a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _segments(file: File, text_key: str, size: int) -> Iterator[Segment]:
    path = Path(file.path)
    if compression(path) == ".zst":
        records.need("zstandard", ".zst")
    if file.format == "jsonl" and not compression(path) and file.size > size:
        count = file.size // size
        cuts = [file.size * n // count for n in range(count + 1)]
        yield from (Segment(file, a, b, b - a) for a, b in pairwise(cuts))
    elif file.format == "parquet":
        rows = records.parquet_groups(path, text_key)
        yield from _weighted(file, rows, size) if rows else [Segment(file, bytes=file.size)]
    elif file.format == "indexed":
        documents = binfile.open_file(path.with_suffix("")).document_count
        count = max(1, min(documents, file.size // size))
        cuts = [documents * n // count for n in range(count + 1)]
        yield from (Segment(file, a, b, file.size // count) for a, b in pairwise(cuts))
    else:
        yield Segment(file, bytes=file.size)


def _weighted(file: File, rows: list[int], size: int) -> Iterator[Segment]:
    """Runs of row groups of about `size` bytes, taking every row as equally long."""
    total, start, waiting = max(sum(rows), 1), 0, 0
    for number, count in enumerate(rows):
        waiting += count
        if file.size * waiting / total >= size or number == len(rows) - 1:
            yield Segment(file, start, number + 1, round(file.size * waiting / total))
            start, waiting = number + 1, 0


def read_unit(folder: Path) -> dict[str, Any] | None:
    """The counts of a finished unit, or None when it is not there or not whole."""
    try:
        return read_object(folder, "unit.json", RefusedError, INDEX)
    except RefusedError:
        return None
