"""Rows of chats, a tokenizer with a chat template, and stores of both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer as Backend

from kumi.data import Store, Tokenizer, load_tokenizer

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content and loop.last %}({{ m.reasoning_content }}) {% endif %}{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def save_tokenizer(tokens: Tokenizer, folder: Path) -> Tokenizer:
    """Save `tokens` to `folder`, with the control tokens of `TEMPLATE`, which it has."""
    folder.mkdir()
    backend = Backend.from_file(str(tokens.folder / "tokenizer.json"))
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return load_tokenizer(folder)


def message(role: str, content: str, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


def chat(number: int) -> dict[str, Any]:
    """Return a row: every fifth has thoughts, which the template shows in the last reply only."""
    thoughts = {"reasoning_content": f"mind {number}"} if number % 5 == 0 else {}
    turns = [message("user", f"ask {n} of {number}") for n in range(2)]
    replies = [message("assistant", f"answer {n} to {number} " + "word " * (number % 9), **thoughts) for n in range(2)]
    messages = [entry for pair in zip(turns, replies, strict=True) for entry in pair]
    return {"messages": [message("system", "be brief"), *messages], "id": number}


def write_rows(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def contents(folder: Path) -> dict[str, bytes]:
    """Return every file of a store, without the times in files.jsonl."""
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.name not in ("files.jsonl", ".kumi-data")}


def trained_texts(store: Store, tokens: Tokenizer, side: str = "train") -> list[list[str]]:
    """Return the trained spans of each sequence of each unit, decoded."""
    result = []
    for source in store.sources:
        if getattr(source, side) is None:
            continue
        file = store.open_units(source, side)
        for unit in range(file.unit_count):
            parts = file.tokens_of(unit)
            trained = (parts.mask & 1).astype(bool)
            starts = np.flatnonzero(np.diff(trained, prepend=False) & trained)
            ends = np.flatnonzero(np.diff(trained, append=False) & trained) + 1
            result.append([tokens.decode(parts.ids[a:b].tolist()) for a, b in zip(starts, ends, strict=True)])
    return result
