"""A small tokenizer and texts of the standard library, made once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kumi.data import Record, Source, Tokenizer, expand, read
from kumi.data.bpe import train as train_tokenizer

JSON_SOURCES = Source("{stdlib}/{json,email,http,logging}/*.py")


@pytest.fixture(scope="session")
def tokens(tmp_path_factory) -> Tokenizer:
    return train_tokenizer([JSON_SOURCES], 600, tmp_path_factory.mktemp("tokenizer") / "bpe")


@pytest.fixture(scope="session")
def texts() -> list[str]:
    """Some 300 documents: pieces of source files of the standard library."""
    whole = [item.text for path in expand(JSON_SOURCES) for item in read(path) if isinstance(item, Record)]
    return [piece for text in whole for piece in text.split("\n\n\n") if piece.strip()][:300]


@pytest.fixture(scope="session")
def write_jsonl():
    def write(path: Path, texts: list[str], key: str = "text") -> Path:
        path.write_text("".join(json.dumps({key: text}) + "\n" for text in texts))
        return path

    return write
