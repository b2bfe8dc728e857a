"""Finished units, in order, to the token files and the description of a store."""

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
from kumi.data import binfile, store, work
from kumi.data.binfile import Array
from kumi.data.tokenizer import Tokenizer
from kumi.data.verify import ContentDigest, add_checksums
from kumi.data.work import SIDES, Plan, Unit
from kumi.errors import ConfigError, KumiError
from kumi.files.output import open_new
from kumi.files.untrusted import json_record
from kumi.spec.source import Source


def join(folder: Path, cache: Path, plan: Plan, tokenizer: Tokenizer) -> None:
    """Writes the store that the units in `cache` make, meta.json last. Raises ConfigError when a side stays empty."""
    counts = [work.read_unit(cache / key) for key in plan.keys]
    by_source: list[list[tuple[Unit, Path, dict[str, Any]]]] = [[] for _ in plan.sources]
    for unit, key, found in zip(plan.units, plan.keys, counts, strict=True):
        if found is None:
            raise KumiError(f"{cache / key}: a finished unit has vanished; run the same command again")
        by_source[unit.source].append((unit, cache / key, found))
    totals = [_total(units) for units in by_source]
    _refuse_empty(plan, totals)
    # From here until the new meta.json is there, the folder describes no store.
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
    total: Counter[str] = Counter()
    for _, _, counts in units:
        total.update({name: value for name, value in counts.items() if isinstance(value, int)})
    return total


def _refuse_empty(plan: Plan, totals: list[Counter[str]]) -> None:
    for source, total in zip(plan.sources, totals, strict=True):
        documents = total["train_documents"] + total["validation_documents"]
        kinds = ", ".join(f"{count} {kind[6:]}" for kind, count in sorted(total.items()) if kind.startswith("fault:"))
        if documents == 0:
            raise ConfigError(f"data source {source.path!r}: holds no usable document ({kinds or 'no record at all'})")
        if total["train_documents"] == 0:
            raise ConfigError(
                f"data source {source.path!r}: validation={plan.options['validation']} holds out all of its "
                f"{documents} documents and leaves none to train on; use a smaller share or more documents"
            )
    held_out = sum(total["validation_documents"] for total in totals)
    if plan.options["validation"] > 0 and held_out == 0:
        documents = sum(total["train_documents"] for total in totals)
        raise ConfigError(
            f"validation={plan.options['validation']} of {documents} documents holds out none; use a larger share, "
            "more documents, or validation=0"
        )


def _names(sources: Sequence[Source]) -> list[str]:
    """A short file name for each source, made from its path and unlike the others."""
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
    """One source's entry of meta.json, and how often each id occurs on each side (2, V)."""
    entry: dict[str, Any] = {"name": name, "path": source.path, "weight": source.weight}
    entry |= {"text_key": source.text_key, "format": source.format, "exclude": list(source.exclude)}
    histogram = np.zeros((2, tokens.vocab_size), np.int64)
    for number, side in enumerate(SIDES):
        prefix = f"{name}_{side}_text_document"
        entry[f"{side}_documents"], entry[f"{side}_tokens"] = total[f"{side}_documents"], total[f"{side}_tokens"]
        entry[side] = prefix if total[f"{side}_documents"] else None
        digest = ContentDigest()
        if entry[side]:
            with binfile.writing(folder / prefix, binfile.token_dtype(tokens.vocab_size)) as append:
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
    found = np.bincount(ids, minlength=tokens.vocab_size)
    if len(found) > tokens.vocab_size:
        raise ConfigError(
            f"{tokens.folder}: gave token id {len(found) - 1}, but its vocabulary has {tokens.vocab_size} ids"
        )
    return found


def _special_in_text(histogram: Array, total: Counter[str], plan: Plan, tokens: Tokenizer) -> int:
    """Special tokens that came from the documents themselves: all of them without those added around each
    document."""
    special = [number for number, token in tokens.backend.get_added_tokens_decoder().items() if token.special]
    documents = total["train_documents"] + total["validation_documents"]
    added = documents * (1 + (plan.options["bos"] is not None))
    framing = {tokens.eos_id, plan.options["bos"]} - {None}
    return int(histogram[:, sorted(framing | set(special))].sum()) - added


def _write_faults(out: TextIO, name: str, units: list[tuple[Unit, Path, dict[str, Any]]]) -> None:
    """The faults of a source in file order; lines of a cut file are counted on from one segment to the next."""
    passed: Counter[str] = Counter()
    for unit, folder, counts in units:
        with store.open_lines(folder, "faults.jsonl") as lines:
            found = [json_record(line) for line in lines]
        for number, segment in enumerate(unit.segments):
            before = passed[segment.file.path]
            for _, file, line, kind, reason in (fault for fault in found if fault[0] == number):
                fault = {"source": name, "file": file, "line": before + line, "kind": kind, "reason": reason}
                out.write(json.dumps(fault) + "\n")
            if segment.file.format == "jsonl":
                passed[segment.file.path] += counts["lines"][number]


def _write_files(path: Path, names: list[str], plan: Plan) -> None:
    with open_new(path) as out:
        for name, files in zip(names, plan.files, strict=True):
            for file in files:
                out.write(json.dumps({"source": name, **asdict(file)}) + "\n")


def _remove_others(folder: Path, entries: list[dict[str, Any]]) -> None:
    """Removes token files of an earlier preparation that this one does not have."""
    wanted = {f"{entry[side]}.{kind}" for entry in entries for side in SIDES for kind in ("bin", "idx")}
    for path in folder.glob("*_text_document.*"):
        if path.name not in wanted:
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
