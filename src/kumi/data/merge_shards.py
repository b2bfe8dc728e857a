"""Merge finished units, in order, into the token files and the meta.json of a store."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any, TextIO

import numpy as np

import kumi
from kumi.data import binfile, shards, store
from kumi.data.binfile import Array
from kumi.data.shards import SIDES, Plan, Unit
from kumi.data.tokenizer import Tokenizer
from kumi.data.verify_store import ContentDigest, add_checksums
from kumi.errors import ConfigError, KumiError
from kumi.files.output import open_new
from kumi.files.untrusted import json_record
from kumi.spec.data_source import Source


def merge_shards(folder: Path, cache: Path, plan: Plan, tokenizer: Tokenizer) -> None:
    """Merge the units in `cache` into a store in `folder`; write meta.json last.

    Raise ConfigError when a source has no training document, or `validation` above 0 holds out no document.
    """
    counts = [shards.read_unit(cache / key) for key in plan.keys]
    by_source: list[list[tuple[Unit, Path, dict[str, Any]]]] = [[] for _ in plan.sources]
    for unit, key, unit_counts in zip(plan.units, plan.keys, counts, strict=True):
        if unit_counts is None:
            raise KumiError(f"{cache / key}: a finished unit has vanished; run the same command again")
        by_source[unit.source].append((unit, cache / key, unit_counts))
    totals = [_total(units) for units in by_source]
    _refuse_empty(plan, totals)
    # Without meta.json the folder is not a store until all new files are written.
    (folder / store.META).unlink(missing_ok=True)
    names = _names(plan.sources)
    with ExitStack() as stack:
        faults = stack.enter_context(open_new(folder / store.FAULTS))
        for name, units in zip(names, by_source, strict=True):
            _write_faults(faults, name, units)
    _write_files(folder / store.FILES, names, plan)
    sums = np.zeros(tokenizer.vocab_size, np.int64)
    entries = []
    for number, name in enumerate(names):
        entry, histogram = _join_source(
            folder, name, plan.sources[number], by_source[number], totals[number], tokenizer
        )
        entry["special_tokens_in_text"] = _special_in_text(histogram, totals[number], plan, tokenizer)
        entries.append(entry | {"files": len(plan.files[number]), "bytes": sum(f.size for f in plan.files[number])})
        sums += histogram[0]
    add_checksums(folder, entries)
    _remove_others(folder, entries)
    store.write_json(folder / store.META, _meta(plan, tokenizer, entries, store.entropy(sums)))


def _total(units: list[tuple[Unit, Path, dict[str, Any]]]) -> Counter[str]:
    """Return the sums of the counts of `units`."""
    total: Counter[str] = Counter()
    for _, _, counts in units:
        total.update({name: value for name, value in counts.items() if isinstance(value, int)})
    return total


def _refuse_empty(plan: Plan, totals: list[Counter[str]]) -> None:
    for source, total in zip(plan.sources, totals, strict=True):
        documents = total["train_documents"] + total["validation_documents"]
        kinds = ", ".join(f"{count} {kind[6:]}" for kind, count in sorted(total.items()) if kind.startswith("fault:"))
        if documents == 0:
            raise ConfigError(
                f"data source {source.path!r}: has no usable document ({kinds or 'no record at all'}); correct the "
                "path, the format or the files"
            )
        if total["train_documents"] == 0:
            raise ConfigError(
                f"data source {source.path!r}: validation={plan.options['validation']} holds out all of its "
                f"{documents} documents and leaves none to train on; use a smaller fraction or more documents"
            )
    held_out = sum(total["validation_documents"] for total in totals)
    if plan.options["validation"] > 0 and held_out == 0:
        documents = sum(total["train_documents"] for total in totals)
        raise ConfigError(
            f"validation={plan.options['validation']} of {documents} documents holds out none; use a larger fraction, "
            "more documents, or validation=0"
        )


def _names(sources: Sequence[Source]) -> list[str]:
    """Return a short, unique file name for each source, derived from its path."""
    names: list[str] = []
    for source in sources:
        words = re.findall(r"[A-Za-z0-9]+", "/".join(source.path.replace("~", "").split("/")[-3:]))
        name = base = "_".join(words)[-60:].lower() or "source"
        number = 2
        while name in names:
            name, number = f"{base}_{number}", number + 1
        names.append(name)
    return names


def _join_source(
    folder: Path,
    name: str,
    source: Source,
    units: list[tuple[Unit, Path, dict[str, Any]]],
    total: Counter[str],
    tokens: Tokenizer,
) -> tuple[dict[str, Any], Array]:
    """Write the token files of one source; return its entry in meta.json and the histogram of ids per side, (2, V)."""
    entry: dict[str, Any] = {"name": name, "path": source.path, "weight": source.weight}
    entry |= {"text_key": source.text_key, "format": source.format, "exclude": list(source.exclude)}
    histogram = np.zeros((2, tokens.vocab_size), np.int64)
    for number, side in enumerate(SIDES):
        prefix = f"{name}_{side}_text_document"
        entry[f"{side}_documents"], entry[f"{side}_tokens"] = total[f"{side}_documents"], total[f"{side}_tokens"]
        entry[side] = prefix if total[f"{side}_documents"] else None
        digest = ContentDigest()
        if entry[side]:
            with binfile.open_writer(folder / prefix, binfile.token_dtype(tokens.vocab_size)) as append:
                for ids, lengths in chain.from_iterable(
                    binfile.open_file(path / side).blocks() for _, path, _ in units
                ):
                    histogram[number] += _histogram(ids, tokens)
                    append(ids, lengths)
                    digest.update(ids, lengths)
        entry[f"{side}_digest"] = digest.hexdigest()
    entry["faults"] = {kind[6:]: count for kind, count in sorted(total.items()) if kind.startswith("fault:")}
    entry["unigram_entropy"] = store.entropy(histogram[0])
    return entry, histogram


def _histogram(ids: Array, tokens: Tokenizer) -> Array:
    """Return how often each id occurs in `ids`, (V,). Raise ConfigError for an id outside the vocabulary."""
    histogram = np.bincount(ids, minlength=tokens.vocab_size)
    if len(histogram) > tokens.vocab_size:
        raise ConfigError(
            f"{tokens.folder}: produced token id {len(histogram) - 1}, but its vocabulary has {tokens.vocab_size} ids; "
            "repair tokenizer.json"
        )
    return histogram


def _special_in_text(histogram: Array, total: Counter[str], plan: Plan, tokens: Tokenizer) -> int:
    """Return the number of special tokens in the text of documents, without the bos and eos added to each document."""
    special = [number for number, token in tokens.backend.get_added_tokens_decoder().items() if token.special]
    documents = total["train_documents"] + total["validation_documents"]
    added = documents * (1 + (plan.options["bos"] is not None))
    framing = {tokens.eos_id, plan.options["bos"]} - {None}
    return int(histogram[:, sorted(framing | set(special))].sum()) - added


def _write_faults(out: TextIO, name: str, units: list[tuple[Unit, Path, dict[str, Any]]]) -> None:
    """Write the faults of a source in file order, with line numbers that count from the start of each file."""
    lines_read: Counter[str] = Counter()
    for unit, folder, counts in units:
        with store.open_lines(folder, "faults.jsonl") as lines:
            faults = [json_record(line) for line in lines]
        for number, segment in enumerate(unit.segments):
            before = lines_read[segment.file.path]
            for _, file, line, kind, reason in (fault for fault in faults if fault[0] == number):
                fault = {"source": name, "file": file, "line": before + line, "kind": kind, "reason": reason}
                out.write(json.dumps(fault) + "\n")
            if segment.file.format == "jsonl":
                lines_read[segment.file.path] += counts["lines"][number]


def _write_files(path: Path, names: list[str], plan: Plan) -> None:
    with open_new(path) as out:
        for name, files in zip(names, plan.files, strict=True):
            for file in files:
                out.write(json.dumps({"source": name, **asdict(file)}) + "\n")


def _remove_others(folder: Path, entries: list[dict[str, Any]]) -> None:
    """Remove the token files of an earlier preparation that are not in `entries`."""
    names = {f"{entry[side]}.{suffix}" for entry in entries for side in SIDES for suffix in ("bin", "idx")}
    for path in folder.glob("*_text_document.*"):
        if path.name not in names:
            path.unlink()


def _meta(plan: Plan, tokens: Tokenizer, entries: list[dict[str, Any]], entropy: float) -> dict[str, Any]:
    added = {token.content: number for number, token in tokens.backend.get_added_tokens_decoder().items()}
    return {
        "kind": "kumi data",
        "kumi": kumi.__version__,
        "fingerprint": plan.fingerprint,
        "tokenizer": {"folder": str(tokens.folder.resolve()), "sha256": tokens.digest, "added_tokens": added},
        "vocab_size": tokens.vocab_size,
        "eos_id": tokens.eos_id,
        "bos_id": tokens.bos_id,
        "add_bos": plan.options["bos"] is not None,
        "append_eos": True,
        "validation": plan.options["validation"],
        "unigram_entropy": entropy,
        "sources": entries,
    }
