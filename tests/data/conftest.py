"""A small tokenizer and texts of the standard library, made once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from chat_rows import chat, message, save_tokenizer, write_rows
from kumi.data import Record, Source, Store, Tokenizer, expand, prepare, read, shards
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


@pytest.fixture(scope="session")
def chat_tokens(tokens, tmp_path_factory) -> Tokenizer:
    return save_tokenizer(tokens, tmp_path_factory.mktemp("tokenizer") / "chat")


@pytest.fixture(scope="session")
def chats() -> list[Any]:
    """300 rows; two are the same but for their ids, and four are faults."""
    rows: list[Any] = [chat(number) for number in range(300)]
    rows[290] = chat(7) | {"id": "copy"}
    rows[50] = "{broken"
    rows[120] = {"messages": [message("user", "no reply")], "id": 1}
    rows[200] = {"other": 1}
    rows[240] = {"messages": [message("user", "q"), message("assistant", "")], "id": 2}
    return rows


@pytest.fixture(scope="session")
def chat_source(chats, tmp_path_factory) -> Source:
    return Source(str(write_rows(tmp_path_factory.mktemp("rows") / "chats.jsonl", chats)))


@pytest.fixture(scope="session")
def stored_chats(chat_source, chat_tokens, tmp_path_factory) -> Store:
    """The chats, prepared in jobs of 8 KiB, so that small inputs are cut as large ones are; tests only read them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "_MIN_BYTES", 8 << 10)
        return prepare([chat_source], chat_tokens, tmp_path_factory.mktemp("stored"), validation=0.2, workers=2)
