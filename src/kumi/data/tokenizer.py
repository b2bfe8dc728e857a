"""Text to token ids with a Hugging Face tokenizer folder, read here or trained here."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kumi.errors import ConfigError
from kumi.files.untrusted import TOKENIZER, read_bytes, read_object, strict_json
from kumi.spec.source import Source

# The file that marks a tokenizer as one that kumi trained, and says from what.
ORIGIN = "kumi_tokenizer.json"

# A longer text is encoded in pieces, for tokenizers need some fifty times the text's size while they work.
PIECE = 4 << 20
# Before a single space between words, and after a single line end before a line that is not indented: no usual
# splitting pattern joins across these.
_SEAM = re.compile(r"(?<=\S)(?= \S)|(?<=\S\n)(?=\S)")
_SEARCH = 1 << 16


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer folder ready for use. `vocab_size` is the highest id + 1; `digest` is the SHA-256 of
    tokenizer.json."""

    folder: Path
    digest: str
    vocab_size: int
    eos_id: int
    bos_id: int | None
    backend: Any = field(repr=False, compare=False)

    def encode(self, text: str) -> list[int]:
        """Ids of `text` without begin or end marks. As in Hugging Face tokenizers, a special token that is spelled
        out in the text becomes that token."""
        ids: list[int] = []
        for piece in pieces(text, PIECE):
            ids.extend(self.backend.encode(piece, add_special_tokens=False).ids)
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text; a text of more than 4 Mi characters is encoded in pieces cut between words.

        Starts threads unless TOKENIZERS_PARALLELISM is false, so a program that forks later must not call it.
        """
        if any(len(text) > PIECE for text in texts):
            return [self.encode(text) for text in texts]
        return [found.ids for found in self.backend.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, special tokens included."""
        return str(self.backend.decode(list(ids), skip_special_tokens=False))


def pieces(text: str, size: int) -> list[str]:
    """`text` in pieces of at most `size` characters, cut between words where there is such a place near the end."""
    result, start = [], 0
    while len(text) - start > size:
        end = start + size
        seams = _SEAM.finditer(text, max(start + size // 2, end - _SEARCH), end)
        seam = max((match.start() for match in seams), default=end)
        result.append(text[start:seam])
        start = seam
    return [*result, text[start:]]


def load(folder: Path | str) -> Tokenizer:
    """The tokenizer of a Hugging Face folder. Raises ConfigError when there is none or its end mark is not known."""
    from tokenizers import Tokenizer as Backend

    folder = Path(folder)
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(
            f"{folder}: no tokenizer.json; give a Hugging Face tokenizer folder (a slow tokenizer becomes one with "
            "transformers' AutoTokenizer.from_pretrained(...).save_pretrained(...))"
        )
    raw = read_bytes(folder, path.name, ConfigError, TOKENIZER.size)
    try:
        strict_json(raw, TOKENIZER)
        backend = Backend.from_str(raw.decode())
    except Exception as error:  # the library raises plain Exception
        raise ConfigError(f"{path}: not a tokenizer that can be read: {error}") from error
    # A saved truncation or padding would silently cut or lengthen documents.
    backend.no_truncation()
    backend.no_padding()
    vocab = backend.get_vocab(with_added_tokens=True)
    eos = _special_id(folder, "eos", backend)
    if eos is None:
        raise ConfigError(
            f"{folder}: the token that ends a document is not known: no eos_token in tokenizer_config.json or "
            "special_tokens_map.json, no single eos_token_id in generation_config.json or config.json; add eos_token "
            "to tokenizer_config.json"
        )
    size = max(vocab.values(), default=-1) + 1
    return Tokenizer(folder, hashlib.sha256(raw).hexdigest(), size, eos, _special_id(folder, "bos", backend), backend)


def train(
    sources: Sequence[Source],
    vocab_size: int,
    out_folder: Path | str,
    *,
    sample_bytes: int = 256 << 20,
    validation: float = 0.0,
) -> Tokenizer:
    """A byte-level BPE learnt from `sources`, in `out_folder`; see kumi.data.bpe.train."""
    from kumi.data import bpe

    return bpe.train(sources, vocab_size, out_folder, sample_bytes=sample_bytes, validation=validation)


def _special_id(folder: Path, name: str, backend: Any) -> int | None:
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        token = _json(folder / file).get(f"{name}_token")
        content = token.get("content") if isinstance(token, dict) else token
        if isinstance(content, str):
            found = backend.token_to_id(content)
            if found is None:
                raise ConfigError(
                    f"{folder / file}: {name}_token {content!r} is not in the vocabulary of tokenizer.json"
                )
            return int(found)
    for file in ("generation_config.json", "config.json"):
        value = _json(folder / file).get(f"{name}_token_id")
        number = value[0] if isinstance(value, list) and len(value) == 1 else value
        if type(number) is int:
            if not 0 <= number < 2**32 or backend.id_to_token(number) is None:
                raise ConfigError(
                    f"{folder / file}: {name}_token_id {number} is not in the vocabulary of tokenizer.json"
                )
            return number
    return None


def _json(path: Path) -> dict[str, Any]:
    return read_object(path.parent, path.name, ConfigError, TOKENIZER, infinity=True) if path.is_file() else {}
