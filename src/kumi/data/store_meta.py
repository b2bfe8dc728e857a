"""The files of a store that describe it: meta.json, with all types checked, and files of JSON lines."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any, TextIO

from kumi.errors import RefusedError
from kumi.files.output import write_text
from kumi.files.untrusted import INDEX, brief, explain, inside, open_stream, read_object
from kumi.spec.data_source import ROW_KINDS

META, FAULTS, FILES = "meta.json", "faults.jsonl", "files.jsonl"

_COUNT, _TEXT, _NUMBER, _NONE = (int,), (str,), (int, float), type(None)
# Keys of meta.json, and of each of its sources -> the types of their values.
_TYPES: dict[str, tuple[type, ...]] = {
    "sources": (list,),
    "tokenizer": (dict,),
    "vocab_size": _COUNT,
    "eos_id": _COUNT,
    "bos_id": (int, _NONE),
    "validation": _NUMBER,
    "unigram_entropy": _NUMBER,
    "fingerprint": _TEXT,
}
SOURCE_TYPES: dict[str, tuple[type, ...]] = {
    "name": _TEXT,
    "path": _TEXT,
    "weight": _NUMBER,
    "train": (str, _NONE),
    "validation": (str, _NONE),
    "train_documents": _COUNT,
    "train_tokens": _COUNT,
    "validation_documents": _COUNT,
    "validation_tokens": _COUNT,
    "faults": (dict,),
    "special_tokens_in_text": _COUNT,
    "unigram_entropy": _NUMBER,
    "train_digest": _TEXT,
    "validation_digest": _TEXT,
}
# Keys of a source that stores of earlier versions lack.
_OPTIONAL = ("train_checksums", "validation_checksums")
# Further keys of a source of examples.
_UNIT_TYPES: dict[str, tuple[type, ...]] = {
    "kind": _TEXT,
    "rows": _COUNT,
    "train_units": _COUNT,
    "train_trained": _COUNT,
    "validation_units": _COUNT,
    "validation_trained": _COUNT,
    "roles": (dict,),
    "samples": (dict,),
    "used": (list,),
    "ignored": (list,),
    "template": (dict,),
}


def read_meta(folder: Path) -> dict[str, Any] | None:
    """Return the checked content of a store's meta.json, or None when `folder` is not a store.

    Raise RefusedError for a missing key or a wrong value.
    """
    if not (folder / META).exists():
        return None
    meta = read_object(folder, META, RefusedError, INDEX)
    if meta.get("kind") != "kumi data":
        return None
    _check_types(folder, "", meta, _TYPES)
    _check_types(folder, "tokenizer.", meta["tokenizer"], {"folder": (str,), "sha256": (str,)})
    for entry in meta["sources"]:
        if not isinstance(entry, dict):
            raise RefusedError(f"{folder / META}: the source {brief(entry)} is not an object; prepare the data again")
        _check_types(folder, "sources.", entry, SOURCE_TYPES)
        _check_types(folder, "sources.", entry, {key: (dict, _NONE) for key in _OPTIONAL if key in entry})
        commits = entry.get("commits", {})
        _check_types(folder, "sources.", {"commits": commits}, {"commits": (dict,)})
        _check_types(folder, "sources.commits.", commits, dict.fromkeys(commits, _TEXT))
        if entry.get("kind", "text") != "text":
            _check_unit_entry(folder, entry)
    return meta


def _check_unit_entry(folder: Path, entry: dict[str, Any]) -> None:
    """Raise RefusedError unless the entry of a source of examples has all keys with values of their types."""
    _check_types(folder, "sources.", entry, _UNIT_TYPES)
    if entry["kind"] not in ROW_KINDS or entry["kind"] == "auto":
        raise RefusedError(
            f"{folder / META}: sources.kind={brief(entry['kind'])} is none of {', '.join(ROW_KINDS[1:])}; remove the "
            "folder and prepare again"
        )
    counts = {"roles", "samples", "faults"}
    for key in counts:
        _check_types(folder, f"sources.{key}.", entry[key], dict.fromkeys(entry[key], _COUNT))
    for key in ("used", "ignored"):
        names = {str(number): name for number, name in enumerate(entry[key])}
        _check_types(folder, f"sources.{key}.", names, dict.fromkeys(names, _TEXT))
    _check_types(folder, "sources.template.", entry["template"], {"origin": _TEXT, "digest": _TEXT})
    for key in ("train_weighted", "validation_weighted"):
        if type(entry.get(key)) is not bool:
            raise RefusedError(
                f"{folder / META}: sources.{key}={brief(entry.get(key))} is not true or false; remove the folder and "
                "prepare again"
            )


def _check_types(folder: Path, prefix: str, entry: dict[str, Any], types: dict[str, tuple[type, ...]]) -> None:
    """Raise RefusedError unless `entry` has all keys of `types` with values of their types, and no negative number."""
    for key, expected in types.items():
        value = entry.get(key, brief)  # the function `brief` stands for a missing value; JSON has no functions
        if not isinstance(value, expected) or isinstance(value, bool) or (isinstance(value, int | float) and value < 0):
            fault = "is missing" if value is brief else f"is {brief(value)}"
            raise RefusedError(f"{folder / META}: {prefix}{key} {fault}; remove the folder and prepare again")


def open_lines(folder: Path, name: str) -> TextIO:
    """Open the text file `name` of a store. Raise RefusedError when it is unreadable or a link out of the folder."""
    try:
        return io.TextIOWrapper(open_stream(inside(folder, name, RefusedError)), encoding="utf-8", errors="replace")
    except OSError as error:
        raise RefusedError(f"{folder / name}: cannot be read ({explain(error)}); prepare the data again") from None


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically."""
    partial = path.with_name(path.name + ".partial")
    write_text(partial, json.dumps(value, indent=2) + "\n")
    os.replace(partial, path)
