"""The model card: README.md of an exported folder, with the record of its verification."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import kumi
from kumi.convert.hf.origin import UNKNOWN, Origin
from kumi.errors import RefusedError
from kumi.files.output import write_text
from kumi.files.untrusted import inside, open_stream, read_bytes
from kumi.spec.families import architecture
from kumi.spec.ledger import num_params
from kumi.spec.model import ModelSpec
from kumi.units import format_count

# Rows of the card's table: how the folder was verified, and the digest of the verified files.
_VERIFIED, _DIGEST = "verified", "SHA-256 of weights, config and tokenizer"


def model_card(
    *,
    name: str,
    model: ModelSpec,
    facts: Mapping[str, str],
    origin: Origin = UNKNOWN,
    base_model: str | None = None,
    relation: str | None = None,
    datasets: Sequence[str] = (),
    license: str | None = None,
    tags: Sequence[str] = (),
) -> str:
    """Return a model card in Markdown with the YAML header that model hubs read; `facts` become rows of its table.

    Base model, relation, datasets and licence come from `origin`, unless given explicitly.
    """
    base = base_model or origin.base_model
    scores = model.head == "score"
    task, kind = ("text-classification", "reward") if scores else ("text-generation", "language")
    auto_class = "AutoModelForSequenceClassification" if scores else "AutoModelForCausalLM"
    header: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": task}
    if base is not None:
        how = relation or ("finetune" if base_model else origin.relation)
        header |= {"base_model": base} | ({"base_model_relation": how} if how else {})
    if datasets or origin.datasets:
        header["datasets"] = list(datasets or origin.datasets)
    header |= {"license": license} if license else dict(origin.license)
    header["tags"] = ["kumi", *tags]
    # JSON is valid YAML, so names with colons or quotes need no escaping.
    lines = [f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in header.items()]
    rows = {"architecture": architecture(model), "parameters": f"{num_params(model):,}"}
    rows |= {"base commit": origin.commit} if origin.commit else {}
    table = ["| | |", "|---|---|", *(f"| {key} | {_cell(value)} |" for key, value in (rows | dict(facts)).items())]
    return "\n".join(
        [
            "---",
            *lines,
            "---",
            "",
            f"# {name}",
            "",
            f"A {format_count(num_params(model))} parameter {kind} model, written by kumi {kumi.__version__}.",
            "",
            *table,
            "",
            "```python",
            f"from transformers import {auto_class}, AutoTokenizer",
            "",
            f'model = {auto_class}.from_pretrained("path/to/this/folder")',
            'tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder")',
            "```",
            "",
        ]
    )


def mark_verified(folder: Path, how: str) -> None:
    """Record in the card of `folder` how it was verified, and the digest of its files."""
    path = folder / "README.md"
    lines = _text(folder).split("\n")
    last = max((index for index, line in enumerate(lines) if line.startswith("|")), default=len(lines) - 1)
    rows = [f"| {_VERIFIED} | {_cell(how)} |", f"| {_DIGEST} | {files_digest(folder)} |"]
    write_text(path, "\n".join([*lines[: last + 1], *rows, *lines[last + 1 :]]))


def check_verified(folder: Path) -> None:
    """Raise RefusedError unless `folder` was verified and its files have not changed since."""
    text = _text(folder) if (folder / "README.md").is_file() else ""
    recorded = re.search(rf"^\| {re.escape(_DIGEST)} \| (\w+) \|$", text, re.M)
    if recorded is None:
        raise RefusedError(
            f"{folder}: its README.md has no record of a verification; write it again with --verify, "
            f"or push it unverified with --unverified"
        )
    if recorded[1] != files_digest(folder):
        raise RefusedError(
            f"{folder}: its files have changed since they were verified; write it again with --verify, or "
            f"push it unverified with --unverified"
        )


def files_digest(folder: Path) -> str:
    """Return the SHA-256 over names and contents of the weights, config.json and tokenizer.json in `folder`."""
    sha = hashlib.sha256()
    names = ("*.safetensors", "config.json", "adapter_config.json", "tokenizer.json")
    for file in sorted(file for name in names for file in folder.glob(name)):
        with open_stream(inside(folder, file.name)) as opened:
            sha.update(f"{file.name} {hashlib.file_digest(opened, 'sha256').hexdigest()}\n".encode())
    return sha.hexdigest()


def _text(folder: Path) -> str:
    return read_bytes(folder, "README.md").decode(errors="replace")


def _cell(text: str) -> str:
    """Return `text` as a Markdown table cell: on one line, with bars escaped."""
    return " ".join(text.split()).replace("|", "\\|")
