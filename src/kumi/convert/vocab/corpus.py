"""Texts to learn tokens from, and a tokenizer's fertility on texts: how many tokens it needs for them."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kumi.convert.vocab.base_tokenizer import Base
from kumi.data import Fault, Source, expand, read
from kumi.data.tokenizer import PIECE, pieces
from kumi.errors import ConfigError

# Bytes of text to sample, spread over all documents: with more, frequencies hardly change.
SAMPLE = 64 << 20
# One of this many documents is held out to measure the tokenizer.
_HELD_OUT = 10
# Words of a tokenizer without a pre-tokenizer begin at blanks (SentencePiece's ▁).
_AT_BLANKS = re.compile("▁*[^▁]+|▁+")


@dataclass(frozen=True)
class Corpus:
    """The sampled documents.

    learn     texts to learn tokens from
    measure   texts to measure the tokenizer on
    faults    number of unreadable records
    """

    learn: tuple[str, ...]
    measure: tuple[str, ...]
    faults: int


def read_corpus(paths: Sequence[str], text_key: str, limit: int = SAMPLE) -> Corpus:
    """Read documents from files, folders or globs, sampled by a hash of the text down to about `limit` bytes.

    Raise ConfigError if there are no documents.
    """
    files = [file for path in paths for file in expand(Source(path, text_key=text_key))]
    fraction = limit / max(1, sum(file.stat().st_size for file in files))
    by_held_out: dict[bool, list[str]] = {True: [], False: []}
    faults = 0
    for file in files:
        for document in read(file, "auto", text_key):
            if isinstance(document, Fault):
                faults += 1
                continue
            draw = int.from_bytes(hashlib.sha256(document.text.encode()).digest()[:8]) / 2**64
            if draw < fraction:
                by_held_out[draw * _HELD_OUT < min(fraction, 1)].append(document.text)
    measure, learn = (tuple(by_held_out[True]), tuple(by_held_out[False]))
    if not learn and not measure:
        raise ConfigError(
            f"--data: {', '.join(paths)} holds no text under the key {text_key!r} ({faults} records "
            f"are unreadable); name files with documents"
        )
    # With few documents one of the two may be empty; it then gets the texts of the other.
    return Corpus(learn or measure, measure or learn, faults)


def words(base: Base, texts: Iterable[str]) -> Counter[str]:
    """Return the words of `texts`, normalized and pre-tokenized as the tokenizer does it, with their counts.

    Raise ConfigError if the tokenizer has no rule for where words begin.
    """
    normalizer, pre_tokenizer = base.backend.normalizer, base.backend.pre_tokenizer
    counts: Counter[str] = Counter()
    for text in texts:
        for piece in pieces(text, PIECE):
            plain = normalizer.normalize_str(piece) if normalizer is not None else piece
            pre_tokens = (
                [word for word, _ in pre_tokenizer.pre_tokenize_str(plain)] if pre_tokenizer is not None else [plain]
            )
            counts.update(word for word in pre_tokens if "▁" not in word[1:])
            counts.update(part for word in pre_tokens if "▁" in word[1:] for part in _AT_BLANKS.findall(word))
    if pre_tokenizer is None and counts and not any("▁" in word for word in counts):
        raise ConfigError(
            f"--learn: {base.folder} has no rule for where words begin, and entire texts would become "
            f"tokens; name the new tokens with --add"
        )
    return counts


def fertility(backend: Any, texts: Sequence[str]) -> Mapping[str, float]:
    """Return, over all `texts`: tokens, tokens per word (separated by blanks), and bytes per token."""
    tokens = sum(
        len(backend.encode(part, add_special_tokens=False).ids) for text in texts for part in pieces(text, PIECE)
    )
    size, count = sum(len(text.encode()) for text in texts), sum(len(text.split()) for text in texts)
    return {"tokens": tokens, "tokens_per_word": tokens / max(1, count), "bytes_per_token": size / max(1, tokens)}
