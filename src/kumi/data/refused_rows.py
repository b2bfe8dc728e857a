"""The refused records of a preparation: list them in order, and stop when they are too many of a source's rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from kumi.data import store_meta
from kumi.data.row_guard import check_refused
from kumi.data.shards import Plan, Unit
from kumi.files.untrusted import json_record


def fault_counts(total: Mapping[str, int]) -> dict[str, int]:
    """Return the refused records by kind, from counts in which they are "fault:kind"."""
    return {kind[6:]: count for kind, count in sorted(total.items()) if kind.startswith("fault:")}


def read_faults(name: str, units: list[tuple[Unit, Path, dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    """Yield the faults of a source in file order, with line numbers that count from the start of each file.

    units: of each unit (a part of the files, see `kumi.data.shards`), its folder in the cache and its counts.
    """
    lines_read: Counter[str] = Counter()
    for unit, folder, counts in units:
        with store_meta.open_lines(folder, "faults.jsonl") as lines:
            faults = [json_record(line) for line in lines]
        for number, segment in enumerate(unit.segments):
            before = lines_read[segment.file.path]
            for _, file, line, kind, reason in (fault for fault in faults if fault[0] == number):
                yield {"source": name, "file": file, "line": before + line, "kind": kind, "reason": reason}
            if segment.file.format == "jsonl":
                lines_read[segment.file.path] += counts["lines"][number]


def refuse_rows(
    path: str, origin: str, total: Mapping[str, int], faults: Iterable[dict[str, Any]], max_refused: float
) -> None:
    """Raise DataError if more than the fraction `max_refused` of the rows of the source `path` is refused.

    total: "rows", and the refused rows by kind as "fault:kind". faults: those of the source, in order.
    """
    refused = fault_counts(total)
    if sum(refused.values()) > max_refused * total["rows"]:
        reasons = [f"{fault['file']}:{fault['line']}: {fault['reason']}" for fault in islice(faults, 3)]
        check_refused(f"data source {path!r}", origin, total["rows"], refused, reasons, max_refused)


def check_stored_rows(folder: Path, max_refused: float) -> None:
    """Raise DataError if more than the fraction `max_refused` of a source's rows of examples in `folder` is refused."""
    meta = store_meta.read_meta(folder)
    assert meta is not None
    for entry in meta["sources"]:
        if entry.get("kind", "text") != "text":
            total = {"rows": entry["rows"]} | {f"fault:{kind}": count for kind, count in entry["faults"].items()}
            with store_meta.open_lines(folder, store_meta.FAULTS) as lines:
                faults = (fault for fault in map(json_record, lines) if fault["source"] == entry["name"])
                refuse_rows(entry["path"], entry["template"]["origin"], total, faults, max_refused)


class RefusedRows:
    """Stops a preparation once a source has more refused rows than the fraction `max_refused` of all its rows.

    Counted are the source's first units (parts of its files), up to the first that is not done. The number of all rows
    is estimated from the rows and bytes of these units.
    """

    def __init__(self, cache: Path, plan: Plan, max_refused: float) -> None:
        self.cache, self.plan, self.max_refused = cache, plan, max_refused
        self.units: list[list[int]] = [[] for _ in plan.sources]
        for number, unit in enumerate(plan.units):
            self.units[unit.source].append(number)
        self.bytes = [sum(plan.units[number].bytes for number in numbers) for numbers in self.units]
        self.done = [0] * len(plan.sources)
        self.bytes_done = [0] * len(plan.sources)
        self.totals: list[Counter[str]] = [Counter() for _ in plan.sources]

    def check(self, source: int, counts: Sequence[dict[str, Any] | None]) -> None:
        """Raise DataError if too many rows of `source` are refused.

        `counts`: those of each unit of the plan, None for a unit that is not done.
        """
        plan, numbers, total = self.plan, self.units[source], self.totals[source]
        if plan.chat is None or plan.formats[source].kind == "text":
            return
        while self.done[source] < len(numbers):
            number = numbers[self.done[source]]
            unit_counts = counts[number]
            if unit_counts is None:
                break
            total.update({name: value for name, value in unit_counts.items() if isinstance(value, int)})
            self.bytes_done[source] += plan.units[number].bytes
            self.done[source] += 1
        refused = sum(count for name, count in total.items() if name.startswith("fault:"))
        if refused * self.bytes_done[source] > self.max_refused * total["rows"] * self.bytes[source]:
            done = numbers[: self.done[source]]
            parts = [(plan.units[number], self.cache / plan.keys[number], counts[number] or {}) for number in done]
            path, origin = plan.sources[source].path, plan.chat["template"]["origin"]
            refuse_rows(path, origin, total, read_faults(path, parts), self.max_refused)
