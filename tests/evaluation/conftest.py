"""A tiny model with a tokenizer, and files of tasks for it."""

from __future__ import annotations

import json
import random
import shutil
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "parity"))

from tiny_models import reference_of

CHAT = Path(__file__).parents[2] / "examples" / "chat"
WORDS = (
    "the",
    "a",
    "cat",
    "dog",
    "sat",
    "on",
    "mat",
    "ran",
    "home",
    "sun",
    "moon",
    "in",
    "of",
    "to",
    "was",
    "big",
    "red",
)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory) -> Path:
    """A Hugging Face folder in float32, with the tokenizer of examples/chat; tests only read it."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    torch.manual_seed(0)
    reference_of("Llama", {"vocab_size": 1024, "max_position_embeddings": 32}).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(CHAT / name, folder)
    return folder


@pytest.fixture(scope="session")
def task_folder(tmp_path_factory) -> Path:
    """Files of documents, questions and answers, and a file of tasks."""
    folder, draw = tmp_path_factory.mktemp("tasks"), random.Random(0)
    texts = [{"text": " ".join(draw.choices(WORDS, k=count))} for count in (1, 30, 80, 7)]
    quiz = [
        {
            "question": f"Which word? {' '.join(draw.choices(WORDS, k=draw.randint(1, 9)))}",
            "choices": [f"{word} {draw.choice(WORDS)}" for word in draw.sample(WORDS, 4)],
            "answer": draw.randrange(4),
        }
        for _ in range(12)
    ]
    sums = [{"question": f"{number} + 1 =", "answer": str(number + 1)} for number in range(4)]
    for name, rows in (("texts", texts), ("quiz", quiz), ("sums", sums)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tasks = [("quiz", "multiple_choice", ""), ("sums", "exact_match", "max_new_tokens = 5\nchat = true\n")]
    (folder / "tasks.toml").write_text(
        "".join(
            f'[[tasks]]\nname = "{name}"\nkind = "{kind}"\npath = "{name}.jsonl"\n{more}' for name, kind, more in tasks
        )
    )
    return folder
