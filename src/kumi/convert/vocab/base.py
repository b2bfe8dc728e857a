"""The tokenizer that is extended: its tokenizer.json as data and as a tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kumi.errors import ConfigError
from kumi.files.untrusted import TOKENIZER, read_bytes, strict_json


@dataclass(frozen=True)
class Base:
    """A tokenizer folder. `vocab` is every token with its id, added ones included, and `size` the highest id + 1."""

    folder: Path
    data: Mapping[str, Any] = field(repr=False)
    backend: Any = field(repr=False, compare=False)
    vocab: Mapping[str, int] = field(repr=False)
    size: int

    @property
    def kind(self) -> str:
        """Which algorithm cuts words: BPE, Unigram, WordPiece or WordLevel."""
        return str(self.data["model"].get("type") or "BPE")

    def pieces(self, text: str) -> tuple[int, ...]:
        """The ids that `text` becomes; none where that would be the token for what is unknown."""
        ids = tuple(self.backend.encode(text, add_special_tokens=False).ids)
        unknown = self.vocab.get(str(self.data["model"].get("unk_token")))
        return () if unknown is not None and unknown in ids else ids


def load_base(folder: Path | None) -> Base:
    """The tokenizer in `folder`; ConfigError when there is none that can be extended."""
    if folder is None:
        raise ConfigError("vocab: the model has no tokenizer; put its tokenizer.json into the folder")
    path = folder / "tokenizer.json"
    if not path.is_file():
        given = "a SentencePiece model (tokenizer.model) alone" if (folder / "tokenizer.model").exists() else "none"
        raise ConfigError(
            f"{folder}: kumi extends tokenizer.json, and there is {given}; make one with transformers: "
            f"AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
        )
    try:
        raw = read_bytes(folder, path.name, ConfigError, TOKENIZER.size)
        base = parsed(folder, strict_json(raw, TOKENIZER), raw.decode("utf-8"))
    except ConfigError:
        raise
    except Exception as error:  # the library raises plain Exception
        raise ConfigError(f"{path}: not a tokenizer that can be read ({error}); fetch it again") from None
    if base.kind not in ("BPE", "Unigram", "WordPiece", "WordLevel"):
        raise ConfigError(f"{path}: kumi does not know how a {base.kind} tokenizer is extended")
    return base


def parsed(folder: Path, data: Mapping[str, Any], text: str) -> Base:
    """The tokenizer that `data`, written as `text`, describes."""
    from tokenizers import Tokenizer

    backend = Tokenizer.from_str(text)
    # A saved truncation or padding would change what a text becomes here.
    backend.no_truncation()
    backend.no_padding()
    vocab = backend.get_vocab(with_added_tokens=True)
    return Base(folder, data, backend, vocab, max(vocab.values(), default=-1) + 1)
