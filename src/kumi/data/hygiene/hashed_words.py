"""Words of a text and their hashes, the same in every process: for shingles, n-grams and digests of texts.

A word is a run of letters and digits in lower case; a Chinese or Japanese character, which no space separates, is a
word of its own. Punctuation and white space do not count."""

from __future__ import annotations

import hashlib
import re
import zlib

import numpy as np

from kumi.data.binfile import Array
from kumi.data.feistel import scramble

_CJK = "\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
_WORD = re.compile(rf"[{_CJK}]|[^\W{_CJK}]+")
# The odd base of a polynomial in the words of an n-gram.
_BASE = np.uint64(0x9E3779B97F4A7C15)


def words_of(text: str) -> list[str]:
    """Return the words of `text`, in order."""
    return _WORD.findall(text.lower())


def gram_hashes(words: list[str], size: int) -> Array:
    """Return a hash of each n-gram of `size` words, (len(words) - size + 1,) uint64.

    For fewer words the result has one hash, of all of them; without a word, it has shape (0,).
    """
    if not words:
        return np.zeros(0, np.uint64)
    crc = zlib.crc32
    values = scramble(np.array([crc(word.encode("utf-8", "surrogatepass")) for word in words], np.uint64))
    size = min(size, len(words))
    count = len(words) - size + 1
    grams = np.zeros(count, np.uint64)
    for first in range(size):
        grams *= _BASE
        grams += values[first : first + count]
    return scramble(grams)


def text_digest(text: str, label: bool | None = None) -> str:
    """Return 32 hexadecimal digits that texts share if they differ in white space only, and have the same `label`."""
    normal = " ".join(text.split()).encode("utf-8", "surrogatepass")
    person = b"kumi-text" if label is None else b"kumi-text-%d" % label
    return hashlib.blake2b(normal, digest_size=16, person=person).hexdigest()
