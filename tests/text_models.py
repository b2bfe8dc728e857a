"""Tiny models with a tokenizer and a chat template, on disk."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from tiny_models import reference_of

CHAT = Path(__file__).parents[1] / "examples" / "chat"
TEXT_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


def write_chat_model(folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Write a Llama of two layers with random weights, and the tokenizer and template of examples/chat."""
    reference_of("Llama", {"vocab_size": 1024, "max_position_embeddings": 256}).to(dtype).save_pretrained(folder)
    for name in TEXT_FILES:
        shutil.copy(CHAT / name, folder)
    return folder


def write_word_model(folder: Path, words: Sequence[str]) -> Path:
    """Write such a model without a template, whose tokens are `words` as they are; the last is its eos token."""
    vocabulary = {word: number for number, word in enumerate(words)}
    reference_of("Llama", {"vocab_size": len(words)}).save_pretrained(folder)
    backend = Backend(models.WordLevel(vocabulary, unk_token=words[0]))
    backend.pre_tokenizer = pre_tokenizers.Split("|", "removed")
    backend.decoder = decoders.Fuse()
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": words[-1]}))
    (folder / "generation_config.json").unlink(missing_ok=True)
    return folder
