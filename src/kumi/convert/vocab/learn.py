"""New tokens from a corpus: the byte-pair merging of the old tokenizer, continued.

The words of the corpus are cut as the old tokenizer cuts them. Then, as when it was trained, the two neighbours that
stand side by side most often become one token, again and again; these merges come after all old ones. So every new
token is reached, and a text in which no new pair occurs is cut as before (Sennrich et al. 2016, section 3.2, begun from
tokens instead of characters). A character that the old vocabulary lacks is a token for itself before it is merged.
"""

from __future__ import annotations

import heapq
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from kumi.convert.vocab.base import Base
from kumi.errors import ConfigError

# Seldom seen once more, such a pair says nothing about other texts.
LEAST = 2
# Letters (bytes, in a byte-level tokenizer) of the longest token: beyond it words are phrases, or tables.
_LONGEST = 48
_BLANK = "▁"
# Above any id.
_LAST = 1 << 40

Pair = tuple[int, int]


@dataclass(frozen=True)
class Piece:
    """A learnt token as it is spelled in the vocabulary; the two tokens it is `merge`d of, None for a character; and
    the old tokens (ids) that the same letters were before."""

    text: str
    merge: tuple[str, str] | None
    parts: tuple[int, ...]
    count: int


def learn(base: Base, words: Mapping[str, int], count: int, taken: Iterable[str] = ()) -> list[Piece]:
    """Up to `count` tokens that shorten `words` (spelled as the vocabulary spells them, with how often) most.

    Fewer where nothing is left that occurs twice. None is one of `taken`, which get ids of their own. Of equally
    frequent pairs that of the lowest ids comes first, as in the library's trainer.
    """
    if base.kind != "BPE":
        raise ConfigError(
            f"--learn: {base.folder} is a {base.kind} tokenizer, whose tokens are not made by merges; "
            f"name the new tokens with --add"
        )
    model = base.data["model"]
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        raise ConfigError(
            f"--learn: {base.folder} marks where words end or go on, which kumi does not continue; name "
            f"the new tokens with --add"
        )
    state = _State(base, frozenset(taken))
    for word, times in sorted(words.items()):
        state.add(word, times)
    state.begin()
    found: list[Piece] = []
    while len(found) < count and (piece := state.step()) is not None:
        found.append(piece)
    return found


@dataclass
class _State:
    """Symbols by number: their spelling, the old tokens they are, their ids, and which of them are no tokens yet; words
    as lists of symbols; where each pair and each pending symbol stands, and how often."""

    base: Base
    taken: frozenset[str]
    texts: list[str] = field(default_factory=list)
    parts: list[tuple[int, ...]] = field(default_factory=list)
    numbers: dict[str, int] = field(default_factory=dict)
    pending: set[int] = field(default_factory=set)
    words: list[list[int]] = field(default_factory=list)
    times: list[int] = field(default_factory=list)
    counts: Counter[Pair | int] = field(default_factory=Counter)
    places: defaultdict[Pair | int, set[int]] = field(default_factory=lambda: defaultdict(set))
    ids: list[int] = field(default_factory=list)
    learnt: int = 0
    heap: list[tuple[int, tuple[int, ...], Pair | int]] = field(default_factory=list)

    def add(self, word: str, times: int) -> None:
        """Another word that occurs `times`; its neighbours and unknown characters are counted."""
        symbols = [self._number(text, parts) for text, parts in _cut(self.base, word)]
        where = len(self.words)
        self.words.append(symbols)
        self.times.append(times)
        seen: list[Pair | int] = [*pairwise(symbols), *(one for one in symbols if one in self.pending)]
        for found in seen:
            self.counts[found] += times
            self.places[found].add(where)

    def begin(self) -> None:
        for found in self.counts:
            self._offer(found)

    def step(self) -> Piece | None:
        """The next token, merged in all words; None where nothing is left."""
        while self.heap:
            negative, _, found = heapq.heappop(self.heap)
            # A count that has changed since was offered again; a pair of what is no token is, once it is one.
            if -negative != self._gain(found) or not self._allowed(found):
                continue
            return self._accept(found) if isinstance(found, int) else self._merge(found)
        return None

    def _number(self, text: str, parts: tuple[int, ...] | None) -> int:
        """The symbol `text`; with `parts` None a barrier, which is part of no token."""
        if text not in self.numbers:
            self.numbers[text] = len(self.texts)
            self.texts.append(text)
            self.parts.append(parts or ())
            # A character that is no token comes after all that are, where both are as frequent.
            self.ids.append(self.base.vocab.get(text, _LAST + ord(text[0]) if text else _LAST))
            if text not in self.base.vocab and parts is not None:
                self.pending.add(self.numbers[text])
        return self.numbers[text]

    def _gain(self, found: Pair | int) -> int:
        """How many tokens shorter the words get."""
        saved = max(len(self.parts[found]) - 1, 1) if isinstance(found, int) else 1
        return self.counts[found] * saved

    def _offer(self, found: Pair | int) -> None:
        if self.counts[found] >= LEAST and self._allowed(found):
            symbols = (found,) if isinstance(found, int) else found
            heapq.heappush(self.heap, (-self._gain(found), tuple(self.ids[one] for one in symbols), found))

    def _allowed(self, found: Pair | int) -> bool:
        if isinstance(found, int):
            return found in self.pending and self.texts[found] not in self.taken
        left, right = self.texts[found[0]], self.texts[found[1]]
        joined = left + right
        if found[0] in self.pending or found[1] in self.pending or "" in (left, right) or len(joined) > _LONGEST:
            return False
        inside = _BLANK in joined.lstrip(_BLANK)  # a token begins with a blank, or is blanks: it never has one inside
        return not (inside or joined in self.base.vocab or joined in self.numbers or joined in self.taken)

    def _accept(self, symbol: int) -> Piece:
        self._known_now(symbol)
        for where in self.places[symbol]:
            word = self.words[where]
            for pair in pairwise(word):
                if symbol in pair:
                    self._offer(pair)
        return Piece(self.texts[symbol], None, self.parts[symbol], self.counts[symbol])

    def _known_now(self, symbol: int) -> None:
        self.pending.discard(symbol)
        self.ids[symbol] = self.base.size + self.learnt
        self.learnt += 1

    def _merge(self, pair: Pair) -> Piece:
        left, right = pair
        count, merge = self.counts[pair], (self.texts[left], self.texts[right])
        new = self._number("".join(merge), self.parts[left] + self.parts[right])
        self._known_now(new)
        changed: set[Pair] = set()
        for where in sorted(self.places[pair]):
            changed |= self._replace(where, pair, new)
        for found in changed:
            self._offer(found)
        return Piece(self.texts[new], merge, self.parts[new], count)

    def _replace(self, where: int, pair: Pair, new: int) -> set[Pair]:
        """The pairs whose counts changed when `new` took the place of `pair` in a word."""
        word, times = self.words[where], self.times[where]
        merged = list(_merged(word, pair, new))
        before, after = Counter(pairwise(word)), Counter(pairwise(merged))
        self.words[where] = merged
        for found, number in before.items():
            self.counts[found] -= number * times
            if found not in after:
                self.places[found].discard(where)
        for found, number in after.items():
            self.counts[found] += number * times
            self.places[found].add(where)
        return {found for found in (*before, *after) if before[found] != after[found]}


def _merged(word: list[int], pair: Pair, new: int) -> Iterable[int]:
    index = 0
    while index < len(word):
        if index + 1 < len(word) and (word[index], word[index + 1]) == pair:
            yield new
            index += 2
        else:
            yield word[index]
            index += 1


def _cut(base: Base, word: str) -> list[tuple[str, tuple[int, ...] | None]]:
    """The old tokens of `word` with their ids; a character that the vocabulary lacks stands for itself, with the tokens
    that spell its bytes, and with None where it is a control character or the end of a line."""
    found: list[tuple[str, tuple[int, ...] | None]] = []
    known = ""
    for letter in word:
        if letter in base.vocab:
            known += letter
            continue
        found += _known(base, known)
        known = ""
        control = unicodedata.category(letter)[0] == "C" or letter.isspace()
        found.append(("", None) if control else (letter, _bytes(base, letter)))
    return found + _known(base, known)


def _known(base: Base, text: str) -> list[tuple[str, tuple[int, ...] | None]]:
    return [(token.value, (token.id,)) for token in base.backend.model.tokenize(text)] if text else []


def _bytes(base: Base, letter: str) -> tuple[int, ...]:
    names = [f"<0x{byte:02X}>" for byte in letter.encode()]
    return tuple(base.vocab[name] for name in names) if all(name in base.vocab for name in names) else ()
