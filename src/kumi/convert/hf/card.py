"""The model card: README.md of an exported folder, with the record of its verification."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kumi
from kumi.convert.hf.origin import UNKNOWN, Origin
from kumi.errors import RefusedError
from kumi.files.output import write_text
from kumi.files.untrusted import inside, open_stream, read_bytes
from kumi.safe_output import inline_markdown
from kumi.spec.families import architecture
from kumi.spec.ledger import num_params
from kumi.spec.model import ModelSpec
from kumi.units import format_count

# Rows of the card's table: how the folder was verified, and the digest of the verified files.
_VERIFIED, _DIGEST = "verified", "SHA-256 of weights, config and tokenizer"


@dataclass(frozen=True)
class CardContents:
    """The contents of a card that do not follow from the model itself; the fields are those of `model_card`."""

    name: str
    facts: Mapping[str, str]
    origin: Origin = UNKNOWN
    datasets: Sequence[str] = ()
    license: str | None = None
    evaluation: str = ""

    def card(self, model: ModelSpec) -> str:
        """Return the card of an export of `model`."""
        return model_card(model=model, **vars(self))


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
    evaluation: str = "",
) -> str:
    """Return a model card in Markdown with the YAML header that model hubs read; `facts` become rows of its table.

    Base model, relation, datasets and licence come from `origin`, unless given explicitly. `evaluation` is the
    Markdown of a section. All other texts are escaped, so that readers see them as they are.
    """
    base = base_model or origin.base_model
    is_reward = model.head == "score"
    task, kind = ("text-classification", "reward") if is_reward else ("text-generation", "language")
    auto_class = "AutoModelForSequenceClassification" if is_reward else "AutoModelForCausalLM"
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
    table = fact_table(rows | dict(facts))
    return "\n".join(
        [
            "---",
            *lines,
            "---",
            "",
            f"# {inline_markdown(name)}",
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
            *evaluation_section(evaluation),
        ]
    )


def fact_table(facts: Mapping[str, str]) -> list[str]:
    """Return the lines of a table with a row for each fact."""
    rows = (f"| {inline_markdown(key)} | {inline_markdown(value)} |" for key, value in facts.items())
    return ["| | |", "|---|---|", *rows]


def evaluation_section(evaluation: str) -> list[str]:
    """Return the lines of the section with the Markdown `evaluation`; none if it is empty."""
    return ["## Evaluation during training", "", evaluation, ""] if evaluation else []


def mark_verified(folder: Path, how: str) -> None:
    """Record in the card of `folder` how it was verified, and the digest of its files."""
    path = folder / "README.md"
    lines = _text(folder).split("\n")
    # The first table has the facts.
    first = next((index for index, line in enumerate(lines) if line.startswith("|")), len(lines))
    end = next((index for index in range(first, len(lines)) if not lines[index].startswith("|")), len(lines))
    rows = [f"| {_VERIFIED} | {inline_markdown(how)} |", f"| {_DIGEST} | {files_digest(folder)} |"]
    write_text(path, "\n".join([*lines[:end], *rows, *lines[end:]]))


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
    """Return the SHA-256 over names and contents of the weights, the config file and tokenizer.json in `folder`."""
    sha = hashlib.sha256()
    names = ("*.safetensors", "config.json", "adapter_config.json", "tokenizer.json")
    for file in sorted(file for name in names for file in folder.glob(name)):
        with open_stream(inside(folder, file.name)) as stream:
            sha.update(f"{file.name} {hashlib.file_digest(stream, 'sha256').hexdigest()}\n".encode())
    return sha.hexdigest()


def _text(folder: Path) -> str:
    return read_bytes(folder, "README.md").decode(errors="replace")
