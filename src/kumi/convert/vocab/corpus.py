"""Texts to learn tokens from, and how many tokens a tokenizer needs for texts."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kumi.convert.vocab.base import Base
from kumi.data import Fault, Source, expand, read
from kumi.data.tokenizer import PIECE, pieces
from kumi.errors import ConfigError

# Characters that are read at most, spread over all documents: beyond it frequencies hardly change.
SAMPLE = 64 << 20
# Of ten documents one is kept to measure with what was learnt from the others.
_HELD_OUT = 10
# Where words begin in a tokenizer that has no rule of its own for that: at blanks.
_AT_BLANKS = re.compile("▁*[^▁]+|▁+")


@dataclass(frozen=True)
class Corpus:
    """Texts to learn from, others to measure on, and how many records could not be read."""

    learn: tuple[str, ...]
    measure: tuple[str, ...]
    faults: int


def read_corpus(paths: Sequence[str], text_key: str, limit: int = SAMPLE) -> Corpus:
    """The documents in files, folders or globs: of more than `limit` bytes, those that a hash of the text picks.

    ConfigError when there are none.
    """
    files = [file for path in paths for file in expand(Source(path, text_key=text_key))]
    share = limit / max(1, sum(file.stat().st_size for file in files))
    kept: dict[bool, list[str]] = {True: [], False: []}
    faults = 0
    for file in files:
        for item in read(file, "auto", text_key):
            if isinstance(item, Fault):
                faults += 1
                continue
            drawn = int.from_bytes(hashlib.sha256(item.text.encode()).digest()[:8]) / 2**64
            if drawn < share:
                kept[drawn * _HELD_OUT < min(share, 1)].append(item.text)
    measure, learn = (tuple(kept[True]), tuple(kept[False]))
    if not learn and not measure:
        raise ConfigError(
            f"--data: {', '.join(paths)} holds no text under the key {text_key!r} ({faults} records "
            f"cannot be read); name files with documents"
        )
    # Of a handful of documents none may be left for one of the two; then both are the same.
    return Corpus(learn or measure, measure or learn, faults)


def words(base: Base, texts: Iterable[str]) -> Counter[str]:
    """The words of `texts` as the tokenizer cuts them before it looks tokens up, with how often each occurs."""
    normalizer, cutter = base.backend.normalizer, base.backend.pre_tokenizer
    found: Counter[str] = Counter()
    for text in texts:
        for piece in pieces(text, PIECE):
            plain = normalizer.normalize_str(piece) if normalizer is not None else piece
            cut = [word for word, _ in cutter.pre_tokenize_str(plain)] if cutter is not None else [plain]
            found.update(word for word in cut if "▁" not in word[1:])
            found.update(part for word in cut if "▁" in word[1:] for part in _AT_BLANKS.findall(word))
    if cutter is None and found and not any("▁" in word for word in found):
        raise ConfigError(
            f"--learn: {base.folder} has no rule for where words begin, so that whole texts would become "
            f"tokens; name the new tokens with --add"
        )
    return found


def fertility(backend: Any, texts: Sequence[str]) -> Mapping[str, float]:
    """Of `texts` together: tokens, tokens for each word between blanks, and bytes that a token stands for."""
    tokens = sum(
        len(backend.encode(part, add_special_tokens=False).ids) for text in texts for part in pieces(text, PIECE)
    )
    size, count = sum(len(text.encode()) for text in texts), sum(len(text.split()) for text in texts)
    return {"tokens": tokens, "tokens_per_word": tokens / max(1, count), "bytes_per_token": size / max(1, tokens)}
