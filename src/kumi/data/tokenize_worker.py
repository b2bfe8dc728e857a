"""Worker process: read jobs from standard input, tokenize each job's unit into the cache, and answer with JSON lines.

A unit is a part of a source's files (see `kumi.data.shards`); `_job` in `kumi.data.preparation` makes the jobs.
kumi.data.pool runs it as `python -m kumi.data.tokenize_worker`. The process is started, not forked, which keeps the
tokenizer's threads and memory out of the parent. A unit's result is a folder with `train` and `validation` token files,
`faults.jsonl`, and `unit.json` with the counts; it gets its final name by one rename.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import sys
import time
import traceback
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from kumi.data import binfile, records, tokenizer
from kumi.data.binfile import Append, Array
from kumi.data.encode_rows import write_units
from kumi.data.excluded_rows import excluded_in
from kumi.data.hygiene.row_texts import TextRow
from kumi.data.job_checks import EXPANSION, Report, check_parent, check_unchanged, in_validation, record_fault
from kumi.data.records import Fault
from kumi.data.row_path import open_row_path
from kumi.data.shards import SIDES
from kumi.data.sources import compression
from kumi.data.tokenizer import Tokenizer
from kumi.errors import ConfigError, KumiError
from kumi.files.output import open_new, remove_tree, write_text

# The most texts that are encoded at a time, and about the most characters; of files of tokens, the bytes.
_BATCH_CHARS = 1 << 18
_BATCH_TEXTS = 1024


def encode_unit(job: dict[str, Any], report: Report) -> dict[str, Any]:
    """Write the unit's folder; return the content of its unit.json. Raise DataError for a fault with on_error="fail".

    `report(bytes, tokens)` is called after each batch.
    """
    tokens = _tokenizer(job["tokenizer"], job["digest"])
    final, partial = Path(job["target"]), Path(f"{job['target']}.{os.getpid()}")
    remove_tree(partial)
    partial.mkdir(parents=True)
    try:
        if "chat" in job:
            counts = write_units(job, open_row_path(job, tokens), tokens, partial, report)
        else:
            counts = _write(job, tokens, partial, report)
        write_text(partial / "unit.json", json.dumps(counts))
        _publish(partial, final)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return counts


@dataclass(frozen=True)
class Sink:
    """Outputs and counts of the unit in progress.

    sides: append functions of the train and validation token files.
    counts: documents, tokens and bytes so far, and faults by kind.
    """

    job: dict[str, Any]
    tokens: Tokenizer
    sides: tuple[Append, Append]
    faults: TextIO
    counts: Counter[str]
    report: Report


def _write(job: dict[str, Any], tokens: Tokenizer, folder: Path, report: Report) -> dict[str, Any]:
    """Write the token files and faults of the unit to `folder`; return its counts."""
    dtype = binfile.token_dtype(tokens.vocab_size)
    counts: Counter[str] = Counter()
    lines, done = [], 0
    with ExitStack() as stack:
        faults = stack.enter_context(open_new(folder / "faults.jsonl"))
        train, held_out = (stack.enter_context(binfile.open_writer(folder / side, dtype)) for side in SIDES)
        sink = Sink(job, tokens, (train, held_out), faults, counts, report)
        for number, segment in enumerate(job["segments"]):
            encode = _encode_indexed if segment["file"]["format"] == "indexed" else _encode_texts
            lines.append(encode(sink, number, segment))
            check_unchanged(segment["file"])
            done += segment["bytes"]
            counts["bytes"] = done
    return {**counts, "lines": lines}


def _encode_texts(sink: Sink, number: int, segment: dict[str, Any]) -> int:
    """Encode the documents of one segment in batches; return the number of lines of the segment."""
    path, fmt = Path(segment["file"]["path"]), segment["file"]["format"]
    items = records.read_range(path, fmt, sink.job["text_key"], segment["start"], segment["end"])
    expansion = EXPANSION if compression(path) else 1
    excluded = excluded_in(sink.job, number, sink.counts)
    texts: list[str] = []
    size = 0
    while True:
        try:
            item = next(items)
        except StopIteration as end:
            _add_texts(sink, texts, size // expansion)
            return int(end.value)
        if isinstance(item, Fault):
            record_fault(sink.job, sink.counts, sink.faults, number, item)
            continue
        if excluded is not None and excluded.leaves_out(TextRow(item.file, item.line, item.text)):
            continue
        texts.append(item.text)
        size += len(item.text)
        if size >= _BATCH_CHARS or len(texts) >= _BATCH_TEXTS:
            _add_texts(sink, texts, size // expansion)
            texts, size = [], 0


def _add_texts(sink: Sink, texts: list[str], size: int) -> None:
    sides = [in_validation(text, sink.job["validation"]) for text in texts]
    encoded = [_with_bos_eos(ids, sink) for ids in sink.tokens.encode_batch(texts)]
    _add(sink, list(zip(sides, encoded, strict=True)), size)


def _encode_indexed(sink: Sink, number: int, segment: dict[str, Any]) -> int:
    """Copy documents that are tokens already; return 0, because indexed files have no lines."""
    path, tokens = Path(segment["file"]["path"]), sink.tokens
    file = binfile.open_file(path.with_suffix(""))
    batch, size = [], 0
    for document in range(segment["start"], segment["end"]):
        ids = file.document(document)
        if len(ids) and (ids.max() >= tokens.vocab_size or ids.min() < 0):
            raise ConfigError(
                f"{path}: document {document} has token ids {ids.min()} to {ids.max()}, outside the "
                f"{tokens.vocab_size} of {tokens.folder}: it was written with another tokenizer; give that tokenizer"
            )
        without_eos = _without_eos(ids.tolist(), tokens)
        if not without_eos:
            record_fault(
                sink.job,
                sink.counts,
                sink.faults,
                number,
                Fault(str(path), document + 1, "empty", "the document has no tokens"),
            )
            continue
        text = tokens.decode(without_eos[1:] if without_eos[0] == tokens.bos_id else without_eos)
        batch.append((in_validation(text, sink.job["validation"]), _with_bos_eos(without_eos, sink)))
        size += ids.nbytes
        if size >= _BATCH_CHARS:
            _add(sink, batch, size)
            batch, size = [], 0
    _add(sink, batch, size)
    return 0


def _without_eos(ids: list[int], tokens: Tokenizer) -> list[int]:
    """Return `ids` without a final eos token, which some writers do not add."""
    return ids[:-1] if ids and ids[-1] == tokens.eos_id else ids


def _with_bos_eos(ids: list[int], sink: Sink) -> list[int]:
    """Return `ids` with an eos token, and with a bos token if the job has `add_bos` and they do not start with it."""
    tokens = sink.tokens
    if sink.job["add_bos"] and ids[:1] != [tokens.bos_id]:
        assert tokens.bos_id is not None
        ids.insert(0, tokens.bos_id)
    ids.append(tokens.eos_id)
    return ids


def _add(sink: Sink, batch: list[tuple[bool, list[int]]], size: int) -> None:
    """Write the documents `batch`, (held out, ids) each, to their sides, and report the progress of the unit."""
    counts, dtype = sink.counts, binfile.token_dtype(sink.tokens.vocab_size)
    for number, side in enumerate(SIDES):
        documents = [ids for held_out, ids in batch if held_out == bool(number)]
        lengths: Array = np.array([len(ids) for ids in documents], np.int64)
        total = int(lengths.sum())
        sink.sides[number](np.fromiter(chain.from_iterable(documents), dtype, total), lengths)
        counts[f"{side}_documents"] += len(documents)
        counts[f"{side}_tokens"] += total
    counts["bytes"] += size
    check_parent(sink.job["parent"])
    sink.report(counts["bytes"], counts["train_tokens"] + counts["validation_tokens"])


@functools.lru_cache(maxsize=1)
def _tokenizer(folder: str, digest: str) -> Tokenizer:
    """Return the tokenizer in `folder`. Raise ConfigError unless its digest is `digest`."""
    loaded = tokenizer.load(folder)
    if loaded.digest != digest:
        raise ConfigError(f"{folder}: tokenizer.json was changed while the data was being prepared; run again")
    return loaded


def _publish(partial: Path, final: Path) -> None:
    """Rename `partial` to `final`, replacing an existing folder."""
    try:
        partial.rename(final)
    except OSError:
        # `final` exists: another worker has published the same result, or an earlier run left a damaged one.
        remove_tree(final)
        partial.rename(final)


def _main() -> None:
    """Run the job in each line of stdin. Answer on stdout with JSON lines.

    Answers of a job: any number of {"progress": bytes, "tokens": n}, then {"result": ...} or {"error": ...}.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    sys.stdout = sys.stderr
    for line in sys.stdin:
        answers.write(json.dumps(_answer(json.loads(line), answers)) + "\n")
        answers.flush()


def _answer(job: dict[str, Any], answers: Any) -> dict[str, Any]:
    """Run `job` and return its last answer; write its progress to `answers` at most twice a second."""
    last = time.monotonic()

    def report(done: int, tokens: int) -> None:
        nonlocal last
        if time.monotonic() - last > 0.5:
            last = time.monotonic()
            answers.write(json.dumps({"progress": done, "tokens": tokens}) + "\n")
            answers.flush()

    try:
        return {"result": encode_unit(job, report)}
    except KumiError as error:
        return {"error": str(error), "kind": type(error).__name__}
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return {"error": f"{where}{error.strerror or error}", "kind": "OSError", "errno": error.errno}
    except Exception:
        return {"error": traceback.format_exc(), "kind": "unexpected"}


if __name__ == "__main__":
    _main()
