"""A worker process: reads units of work from standard input, tokenises each into the cache, answers with one line.

Run by kumi.data.pool as `python -m kumi.data.worker`. A process of its own, started anew and not forked, keeps the
tokenizer's threads and memory out of the program that asked. A unit's result is a folder that appears by one rename:
`train` and `validation` token files, `faults.jsonl` and `unit.json` with the counts.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from kumi.data import binfile, records, tokenizer
from kumi.data.binfile import Append, Array
from kumi.data.records import Fault, Item
from kumi.data.tokenizer import Tokenizer
from kumi.errors import ConfigError, DataError, KumiError

_BATCH_CHARS = 1 << 18
_BATCH_TEXTS = 1024
SIDES = ("train", "validation")
Report = Callable[[int], None]


def in_validation(text: str, fraction: float) -> bool:
    """Whether a document is held out: by a hash of its text alone, so equal documents are always on the same side."""
    raw = hashlib.blake2b(text.encode(), digest_size=8, person=b"kumi-split").digest()
    return int.from_bytes(raw, "little") < fraction * 2**64


def encode_unit(job: dict[str, Any], report: Report) -> dict[str, Any]:
    """Writes the unit's folder and returns what its unit.json holds. Raises DataError at a fault if the job asks for
    it."""
    tokens = _tokenizer(job["tokenizer"], job["digest"])
    final, partial = Path(job["target"]), Path(f"{job['target']}.{os.getpid()}")
    partial.mkdir(parents=True)
    try:
        counts = _write(job, tokens, partial, report)
        (partial / "unit.json").write_text(json.dumps(counts))
        _publish(partial, final)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return counts


def _write(job: dict[str, Any], tokens: Tokenizer, folder: Path, report: Report) -> dict[str, Any]:
    dtype = binfile.token_dtype(tokens.vocab_size)
    counts: Counter[str] = Counter()
    lines: list[int] = []
    with ExitStack() as stack:
        faults = stack.enter_context(open(folder / "faults.jsonl", "w", encoding="utf-8"))
        out = [stack.enter_context(binfile.writing(folder / side, dtype)) for side in SIDES]
        for number, segment in enumerate(job["segments"]):
            before = counts["bytes"]
            encode = _encode_indexed if segment["file"]["format"] == "indexed" else _encode_texts

            def add(batch: list[tuple[bool, list[int]]]) -> None:
                _append(batch, out, dtype, counts)
                _check_parent(job["parent"])

            def fault(item: Fault, number: int = number) -> None:
                if job["on_error"] == "fail":
                    raise DataError(json.dumps([number, item.file, item.line, item.reason]))
                counts[f"fault:{item.kind}"] += 1
                faults.write(json.dumps([number, item.file, item.line, item.kind, item.reason]) + "\n")

            lines.append(encode(job, segment, tokens, add, fault))
            _check_unchanged(segment["file"])
            counts["bytes"] = before + segment["bytes"]
            report(counts["bytes"])
    return {**counts, "lines": lines, "faults": sum(n for kind, n in counts.items() if kind.startswith("fault:"))}


Add = Callable[[list[tuple[bool, list[int]]]], None]
OnFault = Callable[[Fault], None]


def _encode_texts(job: dict[str, Any], segment: dict[str, Any], tokens: Tokenizer, add: Add, fault: OnFault) -> int:
    """Encodes the documents of one range in batches; returns the number of lines the range has."""
    file, texts, size = segment["file"], list[str](), 0

    def flush() -> None:
        sides = [in_validation(text, job["validation"]) for text in texts]
        add([(side, _framed(ids, tokens, job)) for side, ids in zip(sides, tokens.encode_batch(texts), strict=True)])

    reader: Generator[Item, None, int] = records.read_range(
        Path(file["path"]), file["format"], job["text_key"], segment["start"], segment["end"]
    )
    while True:
        try:
            item = next(reader)
        except StopIteration as end:
            flush()
            return int(end.value)
        if isinstance(item, Fault):
            fault(item)
            continue
        texts.append(item.text)
        size += len(item.text)
        if size >= _BATCH_CHARS or len(texts) >= _BATCH_TEXTS:
            flush()
            texts, size = [], 0


def _encode_indexed(job: dict[str, Any], segment: dict[str, Any], tokens: Tokenizer, add: Add, fault: OnFault) -> int:
    """Takes over documents that are tokens already; returns 0, for they have no lines."""
    path = Path(segment["file"]["path"])
    file = binfile.open_file(path.with_suffix(""))
    for number in range(segment["start"], segment["end"]):
        ids = file.document(number)
        if len(ids) and (ids.max() >= tokens.vocab_size or ids.min() < 0):
            raise ConfigError(
                f"{path}: document {number} holds token ids {ids.min()} to {ids.max()}, outside the "
                f"{tokens.vocab_size} of {tokens.folder}: it was written with another tokenizer"
            )
        bare = _bare(ids.tolist(), tokens)
        if not bare:
            fault(Fault(str(path), number + 1, "empty", "the document has no tokens"))
            continue
        text = tokens.decode(bare[1:] if bare[0] == tokens.bos_id else bare)
        add([(in_validation(text, job["validation"]), _framed(bare, tokens, job))])
    return 0


def _bare(ids: list[int], tokens: Tokenizer) -> list[int]:
    """`ids` without their end mark, which not every writer adds."""
    return ids[:-1] if ids and ids[-1] == tokens.eos_id else ids


def _framed(ids: list[int], tokens: Tokenizer, job: dict[str, Any]) -> list[int]:
    """`ids` with the end mark, and the begin mark where asked for and not there yet."""
    if job["add_bos"] and ids[:1] != [tokens.bos_id]:
        assert tokens.bos_id is not None
        ids.insert(0, tokens.bos_id)
    ids.append(tokens.eos_id)
    return ids


def _append(batch: list[tuple[bool, list[int]]], out: list[Append], dtype: np.dtype[Any], counts: Counter[str]) -> None:
    for number, side in enumerate(SIDES):
        mine = [ids for held_out, ids in batch if held_out == bool(number)]
        lengths: Array = np.array([len(ids) for ids in mine], np.int64)
        total = int(lengths.sum())
        out[number](np.fromiter(chain.from_iterable(mine), dtype, total), lengths)
        counts[f"{side}_documents"] += len(mine)
        counts[f"{side}_tokens"] += total


@functools.lru_cache(maxsize=1)
def _tokenizer(folder: str, digest: str) -> Tokenizer:
    found = tokenizer.load(folder)
    if found.digest != digest:
        raise ConfigError(f"{folder}: tokenizer.json was changed while the data was being prepared; run again")
    return found


def _check_unchanged(file: dict[str, Any]) -> None:
    if file["format"] == "indexed":
        return
    now = os.stat(file["path"])
    if (now.st_size, now.st_mtime_ns) != (file["size"], file["mtime"]):
        raise ConfigError(f"{file['path']}: was changed while it was being read; run again when it is complete")


def _check_parent(parent: int) -> None:
    """Ends a worker whose program was killed, before it writes into a folder that a new run may own."""
    if os.getppid() != parent:
        raise SystemExit(1)


def _publish(partial: Path, final: Path) -> None:
    try:
        partial.rename(final)
    except OSError:
        # Another worker published the same result, or a damaged one stands there.
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)


def main() -> None:
    """Answers each job line on stdin with lines on stdout: {"progress": bytes}*, then {"result": ...} or {"error":
    ...}."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    sys.stdout = sys.stderr
    for line in sys.stdin:
        answers.write(json.dumps(_answer(json.loads(line), answers)) + "\n")
        answers.flush()


def _answer(job: dict[str, Any], answers: Any) -> dict[str, Any]:
    last = time.monotonic()

    def report(done: int) -> None:
        nonlocal last
        if time.monotonic() - last > 0.5:
            last = time.monotonic()
            answers.write(json.dumps({"progress": done}) + "\n")
            answers.flush()

    try:
        return {"result": encode_unit(job, report)}
    except KumiError as error:
        return {"error": str(error), "kind": type(error).__name__}
    except OSError as error:
        return {"error": str(error), "kind": "OSError", "errno": error.errno}
    except Exception:
        return {"error": traceback.format_exc(), "kind": "unexpected"}


if __name__ == "__main__":
    main()
