"""The model card: README.md of an exported folder."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import kumi
from kumi.spec.families import FAMILIES
from kumi.spec.ledger import num_params
from kumi.spec.model import ModelSpec
from kumi.units import format_count


def model_card(
    *,
    name: str,
    model: ModelSpec,
    facts: Mapping[str, str],
    base_model: str | None = None,
    relation: str = "finetune",
    datasets: Sequence[str] = (),
    license: str | None = None,
    tags: Sequence[str] = (),
) -> str:
    """A model card in Markdown, with the header that model hubs read. `facts` become a table, in their order."""
    header: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    if base_model is not None:
        header |= {"base_model": base_model, "base_model_relation": relation}
    if datasets:
        header["datasets"] = list(datasets)
    if license is not None:
        header["license"] = license
    header["tags"] = ["kumi", *tags]
    # JSON is YAML: names with colons or quotes need no care.
    lines = [f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in header.items()]
    rows = {"architecture": FAMILIES[model.family].ARCHITECTURE, "parameters": f"{num_params(model):,}", **facts}
    table = ["| | |", "|---|---|", *(f"| {key} | {value} |" for key, value in rows.items())]
    return "\n".join([
        "---", *lines, "---", "", f"# {name}", "",
        f"A {format_count(num_params(model))} parameter language model, written by kumi {kumi.__version__}.", "",
        *table, "", "```python", "from transformers import AutoModelForCausalLM, AutoTokenizer", "",
        'model = AutoModelForCausalLM.from_pretrained("path/to/this/folder")',
        'tokenizer = AutoTokenizer.from_pretrained("path/to/this/folder")', "```", "",
    ])  # fmt: skip
