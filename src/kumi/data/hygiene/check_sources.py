"""Check the sources of a run for exact and near duplicates, and for overlaps with other files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from kumi.data.hygiene.exact_duplicates import DigestTable
from kumi.data.hygiene.near_duplicates import NearDuplicates
from kumi.data.hygiene.overlaps import Overlap, OverlapIndex
from kumi.data.hygiene.row_texts import TextRow, source_rows, with_validation
from kumi.data.record_files import Fault
from kumi.data.row_list import write_row_list
from kumi.data.sources import expand
from kumi.spec.data_source import Source

EXAMPLES = 5
_EXCERPT = 160

Place = tuple[str, int]


def check_sources(
    sources: Sequence[Source], *, near: bool = False, against: Sequence[Path] = (), write: Path | None = None
) -> dict[str, Any]:
    """Return the duplicates among the rows of `sources`, and their overlaps with the files `against`, with examples.

    Rows of a source's own validation data come first, so that their copies in the training data are the duplicates.
    near: look for near duplicates, too. write: a file for the list of all rows that are duplicates or overlap.
    Raise ConfigError for unusable sources or files.
    """
    check = _Check(near, against)
    counts = [check.add_source(source) for source in sources]
    listed = check.listed()
    result: dict[str, Any] = {"rows": len(check.table), "sources": counts}
    result["exact"] = check.summary(listed, "exact")
    result["near"] = check.summary(listed, "near") if near else None
    result["against"] = check.against()
    texts = _excerpts(sources, {place for kind in ("exact", "near") for place in _places(result[kind])})
    for kind in ("exact", "near"):
        for example in (result[kind] or {"examples": []})["examples"]:
            example["text"] = texts.get((example["file"], example["line"]), "")
            example["of"]["text"] = texts.get((example["of"]["file"], example["of"]["line"]), "")
    result["listed"] = len(listed)
    result["list"] = None if write is None else str(write)
    if write is not None:
        write_row_list(write, (check.entry(number, *listed[number]) for number in sorted(listed)))
    return result


class _Check:
    """The rows so far, and for each near duplicate and each overlap, the row or the line with the same text."""

    def __init__(self, near: bool, against: Sequence[Path]) -> None:
        self.table = DigestTable()
        self.near = NearDuplicates() if near else None
        self.overlaps = OverlapIndex(against) if against else None
        self.near_of: dict[int, int] = {}
        self.overlap_of: dict[int, Overlap] = {}
        self._files: set[str] = set()

    def add_source(self, source: Source) -> dict[str, Any]:
        """Add the rows of `source`, except those of files that were read already; return its counts."""
        rows = faults = tokens_only = 0
        for part in with_validation(source):
            paths = [str(path) for path in expand(part)]
            tokens_only += sum(path.endswith(".idx") for path in paths) if part.format == "indexed" else 0
            for item in source_rows(part, self._files):
                if isinstance(item, Fault):
                    faults += 1
                else:
                    rows += 1
                    self._add(item)
            self._files.update(paths)
        return {"path": source.path, "rows": rows, "faults": faults, "files_of_tokens": tokens_only}

    def _add(self, row: TextRow) -> None:
        """Add the next row; compare it with the rows before it and with the other files."""
        number = len(self.table)
        self.table.add(row.file, row.line, row.digest)
        if self.near is not None:
            original = self.near.add(number, row.text)
            if original is not None:
                self.near_of[number] = original
        if self.overlaps is not None:
            overlap = self.overlaps.add(row.text)
            if overlap is not None:
                self.overlap_of[number] = overlap

    def listed(self) -> dict[int, tuple[str, Place]]:
        """Return the rows to leave out: by number, why ("exact", "near" or "overlap") and the place of the other."""
        rows: dict[int, tuple[str, Place]] = {
            number: ("overlap", (overlap.file, overlap.line)) for number, overlap in self.overlap_of.items()
        }
        rows |= {number: ("near", self.table.place(original)) for number, original in self.near_of.items()}
        return rows | {number: ("exact", self.table.place(first)) for number, first in self.table.duplicates()}

    def entry(self, number: int, reason: str, of: Place) -> dict[str, Any]:
        """Return the entry in a list of rows for row `number`, left out because of the text at `of`."""
        file, line = self.table.place(number)
        place = {"file": of[0], "line": of[1]}
        return {"file": file, "line": line, "digest": self.table.digest(number), "reason": reason, "of": place}

    def summary(self, listed: dict[int, tuple[str, Place]], kind: str) -> dict[str, Any]:
        """Return the number of rows listed as `kind`, the number of rows that they duplicate, and the first few."""
        numbers = [number for number in sorted(listed) if listed[number][0] == kind]
        examples = []
        for number in numbers[:EXAMPLES]:
            entry = self.entry(number, *listed[number])
            examples.append({key: entry[key] for key in ("file", "line", "of")})
        return {"rows": len(numbers), "of": len({listed[number][1] for number in numbers}), "examples": examples}

    def against(self) -> list[dict[str, Any]]:
        """Return the counts of the files that rows were compared with, and the first few rows that overlap."""
        files = [] if self.overlaps is None else [file.summary() for file in self.overlaps.files]
        for counts in files:
            numbers = [number for number, overlap in self.overlap_of.items() if overlap.file == counts["file"]]
            counts["examples"] = []
            for number in numbers[:EXAMPLES]:
                (file, line), overlap = self.table.place(number), self.overlap_of[number]
                counts["examples"].append(
                    {"file": file, "line": line, "of": {"line": overlap.line}, "words": overlap.words}
                )
        return files


def _places(summary: dict[str, Any] | None) -> Iterator[Place]:
    for example in (summary or {"examples": []})["examples"]:
        yield example["file"], example["line"]
        yield example["of"]["file"], example["of"]["line"]


def _excerpts(sources: Iterable[Source], places: set[Place]) -> dict[Place, str]:
    """Return the beginning of the texts at `places`, after reading the sources again up to the last of them."""
    texts: dict[Place, str] = {}
    files = {file for file, _ in places}
    for source in sources:
        for part in with_validation(source):
            others = {str(path) for path in expand(part)} - files
            for item in source_rows(part, others):
                if len(texts) == len(places):
                    return texts
                if isinstance(item, TextRow) and (item.file, item.line) in places:
                    texts[item.file, item.line] = " ".join(item.text.split())[:_EXCERPT]
    return texts
