"""Leave the rows of a list out of a preparation: find the listed rows of each segment, and skip them in its job."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from kumi.data.hygiene.row_texts import TextRow
from kumi.data.record_files import BLOCK
from kumi.data.row_list import ListedRow, RowList
from kumi.errors import ConfigError
from kumi.files.untrusted import open_stream


class _Range(Protocol):
    """The fields of `kumi.data.shards.FileRange` that are read here."""

    @property
    def file(self) -> Any: ...
    @property
    def start(self) -> int: ...


def excluded_of(listed: RowList, segments: Sequence[_Range]) -> list[list[ListedRow]]:
    """Return the rows of `listed` in each of `segments`, with their lines as a worker counts them.

    `segments` are all of a preparation. Raise ConfigError if none of them is of a listed file: nothing would be left
    out of that file.
    """
    indexes: dict[str, list[int]] = {}  # file -> indexes of its segments
    for index, segment in enumerate(segments):
        indexes.setdefault(segment.file.path, []).append(index)
    absent = [file for file in listed.rows if file not in indexes]
    if absent:
        raise ConfigError(
            f"data.exclude_rows: {listed.path} names {absent[0]!r}, which no data source reads; list the rows again "
            "with kumi data check --write"
        )
    excluded: list[list[ListedRow]] = [[] for _ in segments]
    for file, rows in listed.rows.items():
        starts = sorted({segments[index].start for index in indexes[file]})
        # Only in JSONL does a worker count lines from a segment's first one.
        relative = segments[indexes[file][0]].file.format == "jsonl" and len(starts) > 1
        before = _lines_before(Path(file), starts) if relative else [0] * len(starts)
        for index in indexes[file]:
            position = starts.index(segments[index].start)
            last = before[position + 1] if relative and position + 1 < len(before) else None
            excluded[index] = [
                (line - before[position], digest)
                for line, digest in rows
                if line > before[position] and (last is None or line <= last)
            ]
    return excluded


def _lines_before(path: Path, offsets: Sequence[int]) -> list[int]:
    """Return the number of lines of `path` that begin before each of `offsets`, which ascend from 0, in one pass."""
    counts, lines, position = [], 1, 0
    with open_stream(path, follow=True) as stream:
        for offset in offsets:
            # A line begins at 0, and after each newline.
            while position < offset - 1 and (block := stream.read(min(BLOCK, offset - 1 - position))):
                lines += block.count(b"\n")
                position += len(block)
            counts.append(lines if offset else 0)
    return counts


def excluded_in(job: dict[str, Any], segment: int, counts: Counter[str]) -> Exclusion | None:
    """Return the rows of segment number `segment` of a worker's job that are left out; None if there are none."""
    rows = job["excluded"][segment] if "excluded" in job else []
    return Exclusion(dict(rows), counts) if rows else None


class Exclusion:
    """Rows of one segment that are left out: digests of their texts by line, and the counts of the job."""

    def __init__(self, digests: dict[int, str], counts: Counter[str]) -> None:
        self._digests, self._counts = digests, counts

    def leaves_out(self, row: TextRow) -> bool:
        """Return whether `row` is left out, and count it. Raise ConfigError if the list has another digest for it."""
        if row.line not in self._digests:
            return False
        listed = self._digests[row.line]
        if listed and listed != row.digest:
            raise ConfigError(
                f"data.exclude_rows: a row that it lists in {row.file} has another text by now; list the rows again "
                "with kumi data check --write"
            )
        self._counts["excluded"] += 1
        return True
