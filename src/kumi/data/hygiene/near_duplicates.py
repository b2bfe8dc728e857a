"""Near duplicates among rows, by MinHash signatures of their shingles (Broder 1997) and locality-sensitive hashing.

A row is a near duplicate if the estimated Jaccard similarity of its shingles and those of an earlier row, which is not
a near duplicate itself, is at least `THRESHOLD`. The index has the signatures of all rows that are not near duplicates:
about 3.5 kB each."""

from __future__ import annotations

from typing import Any

from kumi.data.hygiene.hashed_words import gram_hashes, words_of
from kumi.errors import ConfigError

# Words of a shingle, hashes of a signature, and the least similarity of near duplicates.
SHINGLE, PERMUTATIONS, THRESHOLD = 5, 128, 0.8
# Bands of 4 hashes: a pair of similarity 0.8 is compared with probability 1 - (1 - 0.8^4)^32 = 0.9999999.
BANDS = 32
_SEED = 1


class NearDuplicates:
    """The rows so far that are not near duplicates of an earlier one. Raise ConfigError without the library rensa."""

    def __init__(self) -> None:
        try:
            import rensa
        except ImportError as error:
            raise ConfigError(
                "near duplicates need rensa, which is not installed; pip install 'kumi[hygiene]', or leave out --near"
            ) from error
        self._index: Any = rensa.RMinHashDeduplicator(THRESHOLD, PERMUTATIONS, True, BANDS, _SEED)
        self._signatures: Any = rensa.RMinHash

    def add(self, number: int, text: str) -> int | None:
        """Add row `number`; return the number of the first row that it nearly duplicates, None if there is none."""
        raw = gram_hashes(words_of(text), SHINGLE).tobytes()
        if not raw:
            return None
        signature = self._signatures(PERMUTATIONS, _SEED)
        signature.update([raw[at : at + 8] for at in range(0, len(raw), 8)])
        if self._index.add(str(number), signature):
            return None
        return min(map(int, self._index.get_duplicates(signature)))
