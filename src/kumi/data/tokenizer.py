"""Load a Hugging Face tokenizer folder, and encode and decode text with it."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kumi.errors import ConfigError
from kumi.files.untrusted import TOKENIZER, read_bytes, read_object, strict_json

# File in the folder of a tokenizer that kumi trained; it has a digest of the training input.
ORIGIN = "kumi_tokenizer.json"

# Characters of a piece. Longer texts are encoded in pieces, because tokenizers need about 50 times the text's size in
# memory.
PIECE = 4 << 20
# Positions at which a text may be split: before a single space between words, and after a single newline before a line
# without indentation. The usual pre-tokenizers never join text across them.
_SEAM = re.compile(r"(?<=\S)(?= \S)|(?<=\S\n)(?=\S)")
_SEARCH = 1 << 16  # the last characters of a piece in which it may end early, at a seam


@dataclass(frozen=True)
class Tokenizer:
    """A loaded tokenizer folder.

    vocab_size: the highest id + 1.
    digest: SHA-256 of tokenizer.json.
    eos_id: id of the token that ends every document.
    bos_id: id of the bos_token that the tokenizer's own files name, as in transformers; None without one. The
        bos_token_id of config.json does not count: it is a setting of the model, in Qwen2.5 the token that ends a text.
    backend: the `Tokenizer` of the package tokenizers.
    """

    folder: Path
    digest: str
    vocab_size: int
    eos_id: int
    bos_id: int | None
    backend: Any = field(repr=False, compare=False)

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text` without bos and eos.

        A special token that is spelled out in the text becomes that token, as in Hugging Face tokenizers.
        """
        ids: list[int] = []
        for piece in pieces(text, PIECE):
            ids.extend(self.backend.encode(piece, add_special_tokens=False).ids)
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text; texts of more than 4 Mi characters are encoded in pieces, split between words.

        Starts threads unless TOKENIZERS_PARALLELISM is false, so do not call it in a process that forks later.
        """
        if any(len(text) > PIECE for text in texts):
            return [self.encode(text) for text in texts]
        return [encoding.ids for encoding in self.backend.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, with special tokens."""
        return str(self.backend.decode(list(ids), skip_special_tokens=False))


def pieces(text: str, size: int) -> list[str]:
    """Split `text` into pieces of at most `size` characters, between words if one ends shortly before the limit."""
    result, start = [], 0
    while len(text) - start > size:
        end = start + size
        seams = _SEAM.finditer(text, max(start + size // 2, end - _SEARCH), end)
        seam = max((match.start() for match in seams), default=end)
        result.append(text[start:seam])
        start = seam
    return [*result, text[start:]]


def load(folder: Path | str) -> Tokenizer:
    """Load the tokenizer of a Hugging Face folder. Raise ConfigError when it is missing or its eos token is unknown."""
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
        raise ConfigError(f"{path}: is not a readable tokenizer: {error}; fetch the file again") from error
    # A saved truncation or padding would silently shorten or lengthen documents.
    backend.no_truncation()
    backend.no_padding()
    vocab = backend.get_vocab(with_added_tokens=True)
    eos = _special_id(folder, "eos", backend)
    if eos is None:
        raise ConfigError(
            f"{folder}: the eos token is unknown: no eos_token in tokenizer_config.json or special_tokens_map.json, no "
            "single eos_token_id in generation_config.json or config.json; add eos_token to tokenizer_config.json"
        )
    size = max(vocab.values(), default=-1) + 1
    return Tokenizer(folder, hashlib.sha256(raw).hexdigest(), size, eos, _special_id(folder, "bos", backend), backend)


def _special_id(folder: Path, name: str, backend: Any) -> int | None:
    """Return the id of the special token `name` ("bos" or "eos") in the files of `folder`, or None.

    Ids in the model's generation_config.json and config.json count for eos only: every document needs an end.
    """
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        token = _json(folder / file).get(f"{name}_token")
        content = token.get("content") if isinstance(token, dict) else token
        if isinstance(content, str):
            token_id = backend.token_to_id(content)
            if token_id is None:
                raise ConfigError(
                    f"{folder / file}: {name}_token {content!r} is not in the vocabulary of tokenizer.json"
                )
            return int(token_id)
    for file in ("generation_config.json", "config.json") if name == "eos" else ():
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
