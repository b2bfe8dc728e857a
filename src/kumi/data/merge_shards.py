"""Merge finished units, in order, into the token files and the meta.json of a store.

A unit is a part of a source's files (see `kumi.data.shards`). What packing puts into a row as a whole is a "unit of
examples" here."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

import kumi
from kumi.data import binfile, shards, store, store_meta
from kumi.data.binfile import Array
from kumi.data.merge_units import join_units, samples_of
from kumi.data.refused_rows import fault_counts, read_faults, refuse_rows
from kumi.data.selection import Selection, document_digests
from kumi.data.shards import SIDES, Plan, Unit
from kumi.data.sources import hub_commits
from kumi.data.tokenizer import Tokenizer
from kumi.data.verify_store import ContentDigest, add_checksums, side_files
from kumi.errors import ConfigError, KumiError
from kumi.files.output import open_new
from kumi.spec.data_source import ChatOptions, Source


def merge_shards(
    folder: Path, cache: Path, plan: Plan, tokenizer: Tokenizer, max_refused: float = ChatOptions.max_refused
) -> None:
    """Merge the units in `cache` into a store in `folder`; write meta.json last.

    Raise ConfigError when a source has no training document, or `validation` above 0 holds out no document; DataError
    when more than the fraction `max_refused` of the rows of a source of examples is refused.
    """
    counts = [shards.read_unit(cache / key) for key in plan.keys]
    by_source: list[list[tuple[Unit, Path, dict[str, Any]]]] = [[] for _ in plan.sources]
    for unit, key, unit_counts in zip(plan.units, plan.keys, counts, strict=True):
        if unit_counts is None:
            raise KumiError(f"{cache / key}: a finished unit has vanished; run the same command again")
        by_source[unit.source].append((unit, cache / key, unit_counts))
    totals = [_total(units) for units in by_source]
    names = _names(plan.sources)
    for source, name, fmt, units, total in zip(plan.sources, names, plan.formats, by_source, totals, strict=True):
        if plan.chat is not None and fmt.kind != "text":
            refuse_rows(source.path, plan.chat["template"]["origin"], total, read_faults(name, units), max_refused)
    _refuse_empty(plan, totals)
    # Without meta.json the folder is not a store until all new files are written.
    (folder / store_meta.META).unlink(missing_ok=True)
    with open_new(folder / store_meta.FAULTS) as out:
        for name, units in zip(names, by_source, strict=True):
            for fault in read_faults(name, units):
                out.write(json.dumps(fault) + "\n")
    _write_files(folder / store_meta.FILES, names, plan)
    sums = np.zeros(tokenizer.vocab_size, np.int64)
    entries = []
    for number, name in enumerate(names):
        arguments = (folder, name, plan, number, [path for _, path, _ in by_source[number]], totals[number], tokenizer)
        entry, histogram = (_join_documents if plan.formats[number].kind == "text" else _join_rows)(*arguments)
        if totals[number]["excluded"]:
            entry["excluded"] = totals[number]["excluded"]
        entries.append(entry | {"files": len(plan.files[number]), "bytes": sum(f.size for f in plan.files[number])})
        sums += histogram[0]
    add_checksums(folder, entries)
    _remove_others(folder, entries)
    store_meta.write_json(folder / store_meta.META, _meta(plan, tokenizer, entries, store.entropy(sums)))


def _total(units: list[tuple[Unit, Path, dict[str, Any]]]) -> Counter[str]:
    """Return the sums of the counts of `units`."""
    total: Counter[str] = Counter()
    for _, _, counts in units:
        total.update({name: value for name, value in counts.items() if isinstance(value, int)})
    return total


def _refuse_empty(plan: Plan, totals: list[Counter[str]]) -> None:
    """Raise ConfigError for a source without a training document, or if nothing is held out against `validation`."""
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


def _join_documents(
    folder: Path, name: str, plan: Plan, number: int, parts: list[Path], total: Counter[str], tokens: Tokenizer
) -> tuple[dict[str, Any], Array]:
    """Write the token files of source `number` from `parts`, the folders of its finished units.

    Return the source's entry in meta.json and the histogram of ids per side, (2, V).
    """
    source = plan.sources[number]
    entry = _entry(name, source)
    histogram = np.zeros((2, tokens.vocab_size), np.int64)
    for row, side in enumerate(SIDES):
        prefix = f"{name}_{side}_text_document"
        entry[f"{side}_documents"], entry[f"{side}_tokens"] = total[f"{side}_documents"], total[f"{side}_tokens"]
        entry[side] = prefix if total[f"{side}_documents"] else None
        digest = ContentDigest()
        if entry[side]:
            most = None if row else source.max
            with binfile.open_writer(folder / prefix, binfile.token_dtype(tokens.vocab_size)) as append:
                for ids, lengths in _documents([path / side for path in parts], most):
                    histogram[row] += _histogram(ids, tokens)
                    append(ids, lengths)
                    digest.update(ids, lengths)
            file = binfile.open_file(folder / prefix)
            entry[f"{side}_documents"], entry[f"{side}_tokens"] = file.document_count, file.token_count
        entry[f"{side}_digest"] = digest.hexdigest()
    entry["faults"] = fault_counts(total)
    entry["unigram_entropy"] = store.entropy(histogram[0])
    entry["special_tokens_in_text"] = _special_in_text(histogram, entry, plan, tokens)
    return entry, histogram


def _documents(prefixes: Sequence[Path], most: int | None) -> Iterator[tuple[Array, Array]]:
    """Yield (ids, lengths) of the documents of all `prefixes` in blocks; at most `most` of them, chosen by a hash."""
    files = [binfile.open_file(prefix) for prefix in prefixes]
    choice = None
    if most is not None:
        choice = Selection((document_digests(*block) for file in files for block in file.blocks()), most)
    for ids, lengths in chain.from_iterable(file.blocks() for file in files):
        if choice is None:
            yield ids, lengths
        else:
            chosen = choice.admits(document_digests(ids, lengths))
            yield ids[np.repeat(chosen, lengths)], lengths[chosen]


def _join_rows(
    folder: Path, name: str, plan: Plan, number: int, parts: list[Path], total: Counter[str], tokens: Tokenizer
) -> tuple[dict[str, Any], Array]:
    """Write the units of examples of source `number`; arguments and result are those of `_join_documents`."""
    source, fmt, chat = plan.sources[number], plan.formats[number], plan.chat
    assert chat is not None
    joined, histogram = join_units(
        folder, name, fmt.kind, parts, source.max, tokens.vocab_size, partial(_histogram, tokens=tokens)
    )
    entry = _entry(name, source) | {"kind": fmt.kind} | joined
    entry |= {"rows": total["rows"], "samples": samples_of(total), "faults": fault_counts(total)}
    entry |= {"used": list(fmt.used), "ignored": list(fmt.ignored), "columns": dict(fmt.columns)}
    entry["template"] = {key: chat["template"][key] for key in ("origin", "digest")}
    entry |= {"special_tokens_in_text": total["special"], "unigram_entropy": store.entropy(histogram[0])}
    return entry, histogram


def _entry(name: str, source: Source) -> dict[str, Any]:
    """Return the beginning of the entry of `source` in meta.json."""
    entry: dict[str, Any] = {"name": name, "path": source.path, "weight": source.weight}
    commits = hub_commits(source)
    entry |= {"text_key": source.text_key, "format": source.format, "exclude": list(source.exclude)}
    return entry | ({"commits": commits} if commits else {})


def _histogram(ids: Array, tokens: Tokenizer) -> Array:
    """Return how often each id occurs in `ids`, (V,). Raise ConfigError for an id outside the vocabulary."""
    histogram = np.bincount(ids, minlength=tokens.vocab_size)
    if len(histogram) > tokens.vocab_size:
        raise ConfigError(
            f"{tokens.folder}: produced token id {len(histogram) - 1}, but its vocabulary has {tokens.vocab_size} ids; "
            "repair tokenizer.json"
        )
    return histogram


def _special_in_text(histogram: Array, entry: dict[str, Any], plan: Plan, tokens: Tokenizer) -> int:
    """Return the number of special tokens in the text of documents, without the bos and eos added to each document."""
    special = [number for number, token in tokens.backend.get_added_tokens_decoder().items() if token.special]
    documents: int = entry["train_documents"] + entry["validation_documents"]
    added = documents * (1 + (plan.options["bos"] is not None))
    framing = {tokens.eos_id, plan.options["bos"]} - {None}
    return int(histogram[:, sorted(framing | set(special))].sum()) - added


def _write_files(path: Path, names: list[str], plan: Plan) -> None:
    """Write the list of all input files, one JSON line each."""
    with open_new(path) as out:
        for name, files in zip(names, plan.files, strict=True):
            for file in files:
                out.write(json.dumps({"source": name, **asdict(file)}) + "\n")


def _remove_others(folder: Path, entries: list[dict[str, Any]]) -> None:
    """Remove the files of an earlier preparation that are not those of `entries`."""
    names = {path.name for entry in entries for side in SIDES for path in side_files(folder, entry, side)}
    for path in folder.glob("*_text_document.*"):
        if path.name not in names:
            path.unlink()


def _meta(plan: Plan, tokens: Tokenizer, entries: list[dict[str, Any]], entropy: float) -> dict[str, Any]:
    """Return the content of meta.json; `entropy` is that of all training tokens."""
    added = {token.content: number for number, token in tokens.backend.get_added_tokens_decoder().items()}
    return {
        "kind": "kumi data",
        "kumi": kumi.__version__,
        "fingerprint": plan.fingerprint,
        "blocks": plan.blocks,
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
