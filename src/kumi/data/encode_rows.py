"""The part of a worker's job for rows that are examples: read and convert each row, encode it as units, write them.

A unit here is an `EncodedUnit`: one sequence, or both sides of a preference. A row gives one unit or several."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from kumi.data.binfile import Array, token_dtype
from kumi.data.chat.masked import TRAINED, EncodedUnit, RowRefused
from kumi.data.excluded_rows import excluded_in
from kumi.data.formats.example import Example
from kumi.data.hygiene.row_texts import example_row
from kumi.data.job_checks import Report, check_parent, check_unchanged, in_validation, record_fault
from kumi.data.record_files import Fault
from kumi.data.row_path import RowPath
from kumi.data.shards import SIDES
from kumi.data.tokenizer import Tokenizer
from kumi.data.unit_files import UNIT_COLUMNS, UnitTokens
from kumi.data.unit_writer import UnitWriter, open_unit_writer
from kumi.files.output import open_new

# The tokens and the units after which a batch is written.
_BATCH_TOKENS, _BATCH_UNITS = 1 << 18, 1024
# The largest number of a message that fits a store's turn file.
_LAST_TURN = 0xFFFF


@dataclass
class _Batch:
    """Units of training or of validation data that wait to be written, with the digests of their rows."""

    units: list[EncodedUnit] = field(default_factory=list)
    digests: list[int] = field(default_factory=list)
    tokens: int = 0

    def add(self, units: Iterable[EncodedUnit], digest: int) -> None:
        """Add the units of one row."""
        for unit in units:
            self.units.append(unit)
            self.digests.append(digest)
            self.tokens += sum(len(sequence.ids) for sequence in unit.sequences)


def write_units(job: dict[str, Any], path: RowPath, tokens: Tokenizer, folder: Path, report: Report) -> dict[str, Any]:
    """Write the units and faults of the job's segments to `folder`; return the counts for unit.json.

    path: the functions that turn the rows into units. The counts are those of a job of documents (see
    `kumi.data.tokenize_worker`), and: rows (used and refused), samples:N (rows that became N units), special (control
    tokens that are spelled out in texts), and for train and validation the units and the trained tokens.
    """
    counts: Counter[str] = Counter()
    lines, done = [], 0
    path.encoder.counts.clear()
    with ExitStack() as stack:
        faults = stack.enter_context(open_new(folder / "faults.jsonl"))
        writers = [
            stack.enter_context(open_unit_writer(folder / side, token_dtype(tokens.vocab_size), path.kind))
            for side in SIDES
        ]
        worker = _RowWorker(job, path, tokens, faults, counts, writers, report)
        for number, segment in enumerate(job["segments"]):
            lines.append(worker.encode_segment(number, segment))
            check_unchanged(segment["file"])
            done += segment["bytes"]
            counts["bytes"] = done
        worker.flush()
        counts["special"] = path.encoder.counts["control_tokens_as_text"]
    return {**counts, "lines": lines}


class _RowWorker:
    """Encodes the rows of a job's segments; training and validation units wait in two batches to be written."""

    def __init__(
        self,
        job: dict[str, Any],
        path: RowPath,
        tokens: Tokenizer,
        faults: TextIO,
        counts: Counter[str],
        writers: Sequence[UnitWriter],
        report: Report,
    ) -> None:
        self.job, self.path, self.faults, self.counts = job, path, faults, counts
        self.writers, self.report = writers, report
        self.dtype = token_dtype(tokens.vocab_size)
        self.batches = tuple(_Batch() for _ in SIDES)

    def encode_segment(self, number: int, segment: dict[str, Any]) -> int:
        """Encode the rows of one segment; return the number of its lines."""
        rows = self.path.read(segment)
        excluded = excluded_in(self.job, number, self.counts)
        file = segment["file"]["path"]
        while True:
            try:
                item = next(rows)
            except StopIteration as end:
                return int(end.value)
            self.counts["rows"] += 1
            if isinstance(item, Fault):
                self._refuse(number, item)
                continue
            line, row = item
            try:
                example = self.path.convert(row, file, line)
                if excluded is None or not excluded.leaves_out(example_row(example)):
                    self._encode(number, example)
            except RowRefused as error:
                self._refuse(number, Fault(file, line, error.kind, error.reason))

    def _encode(self, segment: int, example: Example) -> None:
        """Add the units of `example` to the training or validation batch; write both batches if one is full."""
        content = content_of(example)
        with self.path.guarded(segment, example.line):
            units = self.path.encoder.encode(example)
        for unit in units:
            _check_unit(unit, self.path.kind)
        held_out = in_validation(content, self.job["validation"])
        self.batches[held_out].add(units, digest_of(content))
        self.counts[f"samples:{len(units)}"] += 1
        self.counts["bytes"] += len(content)
        if any(batch.tokens >= _BATCH_TOKENS or len(batch.units) >= _BATCH_UNITS for batch in self.batches):
            self.flush()

    def _refuse(self, segment: int, fault: Fault) -> None:
        record_fault(self.job, self.counts, self.faults, segment, fault)

    def flush(self) -> None:
        """Write the units that wait, and report the progress of the job."""
        check_parent(self.job["parent"])
        for side, batch, writer in zip(SIDES, self.batches, self.writers, strict=True):
            if batch.units:
                tokens, columns = to_arrays(batch.units, batch.digests, self.dtype)
                extras = [json.dumps(dict(unit.extra), sort_keys=True).encode() for unit in batch.units]
                writer.append(tokens, columns, extras)
                self.counts[f"{side}_trained"] += int(columns["trained"].sum(dtype=np.int64))
                batch.units, batch.digests, batch.tokens = [], [], 0
            self.counts[f"{side}_units"] = writer.units
            self.counts[f"{side}_documents"] = writer.documents
            self.counts[f"{side}_tokens"] = writer.tokens
        self.report(self.counts["bytes"], sum(writer.tokens for writer in self.writers))


def content_of(example: Example) -> bytes:
    """Return what decides the units of a row, as bytes: without its file, its line and the columns that are ignored."""
    value = {
        "sides": [asdict(side) for side in example.sides],
        "label": example.label,
        "margin": example.margin,
        "extra": dict(example.extra),
    }
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)
    return text.encode("utf-8", "surrogatepass")


def digest_of(content: bytes) -> int:
    """Return the digest of a row's content for `UNIT_COLUMNS`; independent of the hash that holds rows out."""
    raw = hashlib.blake2b(content, digest_size=8, person=b"kumi-row").digest()
    return int.from_bytes(raw, "little")


def _check_unit(unit: EncodedUnit, kind: str) -> None:
    """Raise RowRefused for a unit that the store cannot represent, or that trains nothing."""
    last = max((max(sequence.turns, default=0) for sequence in unit.sequences), default=0)
    if last > _LAST_TURN:
        raise RowRefused("too-long", f"message {last} of the conversation: at most {_LAST_TURN} messages are read")
    # Nothing predicts the first token of a sequence.
    if kind != "prompt" and not all(any(map(TRAINED.__and__, side.mask[1:])) for side in unit.sequences):
        raise RowRefused(
            "nothing-trained", "no token of the row would be trained; it has no reply, or all are left out"
        )


def to_arrays(units: Sequence[EncodedUnit], digests: Sequence[int], dtype: np.dtype[Any]) -> tuple[UnitTokens, Array]:
    """Return the tokens of `units` in arrays, and a record of `UNIT_COLUMNS` for each; first_document is left at 0."""
    sequences = [sequence for unit in units for sequence in unit.sequences]
    lengths = np.array([len(sequence.ids) for sequence in sequences], np.int32)
    total = int(lengths.sum(dtype=np.int64))

    def joined(values: Iterable[Sequence[int]], kind: Any) -> Array:
        return np.fromiter(chain.from_iterable(values), kind, total)

    mask = joined((sequence.mask for sequence in sequences), np.uint8)
    weights = None
    if any(sequence.weights is not None for sequence in sequences):
        full = (
            sequence.weights if sequence.weights is not None else [1.0] * len(sequence.ids) for sequence in sequences
        )
        weights = np.fromiter(chain.from_iterable(full), np.float32, total)
    ids, turns = (
        joined((getattr(s, name) for s in sequences), kind) for name, kind in (("ids", dtype), ("turns", "<u2"))
    )
    columns = np.zeros(len(units), UNIT_COLUMNS)
    columns["documents"] = [len(unit.sequences) for unit in units]
    columns["label"] = [-1 if unit.label is None else int(unit.label) for unit in units]
    columns["margin"] = [np.nan if unit.margin is None else unit.margin for unit in units]
    columns["digest"] = digests
    firsts = np.cumsum(columns["documents"]) - columns["documents"]
    ends = np.cumsum(lengths, dtype=np.int64)
    columns["tokens"] = np.add.reduceat(lengths, firsts)
    sums = np.concatenate([[0], np.cumsum(mask & TRAINED, dtype=np.int64)])
    last = ends[firsts + columns["documents"] - 1]
    columns["trained"] = sums[last] - sums[last - columns["tokens"]]
    return UnitTokens(ids, mask, turns, weights, lengths), columns
