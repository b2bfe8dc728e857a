"""The tokenizer to extend: its tokenizer.json as data and as a tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kumi.errors import ConfigError
from kumi.files.untrusted import TOKENIZER, read_bytes, strict_json


@dataclass(frozen=True)
class Base:
    """The tokenizer in `folder`: `data` is its tokenizer.json, `backend` the same as a `tokenizers.Tokenizer`.

    `vocab` maps every token, including added ones, to its id; `size` is the highest id + 1.
    """

    folder: Path
    data: Mapping[str, Any] = field(repr=False)
    backend: Any = field(repr=False, compare=False)
    vocab: Mapping[str, int] = field(repr=False)
    size: int

    @property
    def kind(self) -> str:
        """The tokenization model: BPE, Unigram, WordPiece or WordLevel."""
        return str(self.data["model"].get("type") or "BPE")

    def token_ids(self, text: str) -> tuple[int, ...]:
        """Return the ids of the tokens of `text`; empty if one of them is the unknown token."""
        ids = tuple(self.backend.encode(text, add_special_tokens=False).ids)
        unknown = self.vocab.get(str(self.data["model"].get("unk_token")))
        return () if unknown is not None and unknown in ids else ids


def load_base(folder: Path | None) -> Base:
    """Load the tokenizer in `folder`; raise ConfigError unless it can be extended."""
    if folder is None:
        raise ConfigError("vocab: the model has no tokenizer; put its tokenizer.json into the model's folder")
    path = folder / "tokenizer.json"
    if not path.is_file():
        alternative = (
            "a SentencePiece model (tokenizer.model) alone" if (folder / "tokenizer.model").exists() else "none"
        )
        raise ConfigError(
            f"{folder}: kumi extends a tokenizer.json, but there is {alternative}; make one with transformers: "
            f"AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
        )
    try:
        raw = read_bytes(folder, path.name, ConfigError, TOKENIZER.size)
        base = parse_tokenizer(folder, strict_json(raw, TOKENIZER), raw.decode("utf-8"))
    except ConfigError:
        raise
    except Exception as error:  # the library raises plain Exception
        raise ConfigError(f"{path}: not a readable tokenizer ({error}); fetch it again") from None
    if base.kind not in ("BPE", "Unigram", "WordPiece", "WordLevel"):
        raise ConfigError(
            f"{path}: kumi cannot extend a {base.kind} tokenizer, only BPE, Unigram, WordPiece and WordLevel; name "
            f"another model"
        )
    return base


def parse_tokenizer(folder: Path, data: Mapping[str, Any], text: str) -> Base:
    """Return the tokenizer `data`; `text` is `data` as JSON."""
    from tokenizers import Tokenizer

    backend = Tokenizer.from_str(text)
    # Saved truncation or padding would change the ids of a text.
    backend.no_truncation()
    backend.no_padding()
    vocab = backend.get_vocab(with_added_tokens=True)
    return Base(folder, data, backend, vocab, max(vocab.values(), default=-1) + 1)
