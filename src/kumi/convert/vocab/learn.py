"""Learn new tokens from a corpus by continuing the old tokenizer's BPE training.

The corpus is tokenized with the old tokenizer. Then the most frequent pair of neighbours is merged into a new token,
repeatedly (Sennrich et al. 2016, section 3.2, starting from tokens instead of characters). New merges come after all
old ones: every new token is reachable, and a text without new pairs is tokenized as before. A character that the old
vocabulary lacks must become a token itself before it is merged.
"""

from __future__ import annotations

import heapq
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from kumi.convert.vocab.base_tokenizer import Base
from kumi.errors import ConfigError

# Minimum count of a pair to merge; a pair that occurs once says nothing about other texts.
MIN_COUNT = 2
# Upper bound on the letters of a token (bytes, in a byte-level tokenizer); longer ones are phrases.
_LONGEST = 48
# SentencePiece's blank.
_BLANK = "▁"
# A rank that sorts after every id.
_LAST = 1 << 40

Pair = tuple[int, int]


@dataclass(frozen=True)
class Piece:
    """A learnt token.

    text    its spelling in the vocabulary
    merge   the two tokens that it merges; None for a character
    parts   the old tokens (ids) of the same text
    count   occurrences when it was learnt
    """

    text: str
    merge: tuple[str, str] | None
    parts: tuple[int, ...]
    count: int


def learn(base: Base, words: Mapping[str, int], count: int, taken: Iterable[str] = ()) -> list[Piece]:
    """Return up to `count` new tokens, fewer if no pair occurs twice any more.

    `words` maps words, in the vocabulary's spelling, to their counts. The texts in `taken` are not learnt: they
    become tokens in another way. Of equally frequent pairs, the pair with the lowest ids comes first, as in the
    tokenizers library's trainer. Raise ConfigError for a tokenizer other than plain BPE.
    """
    if base.kind != "BPE":
        raise ConfigError(
            f"--learn: {base.folder} is a {base.kind} tokenizer, and kumi learns tokens by BPE merges only; "
            f"name the new tokens with --add"
        )
    model = base.data["model"]
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        raise ConfigError(
            f"--learn: {base.folder} has markers for the end or continuation of words, which kumi does not support; "
            f"name the new tokens with --add"
        )
    state = _State(base, frozenset(taken))
    for word, times in sorted(words.items()):
        state.add(word, times)
    state.begin()
    result: list[Piece] = []
    while len(result) < count and (piece := state.step()) is not None:
        result.append(piece)
    return result


@dataclass
class _State:
    """The corpus during training: words as lists of symbols. A symbol is an old token, a learnt token or a character.
    A candidate for the next token is a pair of neighbouring symbols, or a character that is no token yet.

    texts, parts, ids   by symbol: spelling, old tokens (ids) of the same text, id (or rank, while pending)
    symbol_of           symbol by spelling
    pending             symbols that are characters, not tokens yet
    words, times        words as symbols, and their counts
    counts, places      by pair or pending symbol: occurrences, and the words that have it
    heap                candidates, the most valuable first; outdated ones are skipped
    """

    base: Base
    taken: frozenset[str]
    texts: list[str] = field(default_factory=list)
    parts: list[tuple[int, ...]] = field(default_factory=list)
    symbol_of: dict[str, int] = field(default_factory=dict)
    pending: set[int] = field(default_factory=set)
    words: list[list[int]] = field(default_factory=list)
    times: list[int] = field(default_factory=list)
    counts: Counter[Pair | int] = field(default_factory=Counter)
    places: defaultdict[Pair | int, set[int]] = field(default_factory=lambda: defaultdict(set))
    ids: list[int] = field(default_factory=list)
    learnt: int = 0
    heap: list[tuple[int, tuple[int, ...], Pair | int]] = field(default_factory=list)

    def add(self, word: str, times: int) -> None:
        """Add a word that occurs `times`; count its pairs and pending characters."""
        symbols = [self._symbol(text, parts) for text, parts in _tokenize(self.base, word)]
        word_index = len(self.words)
        self.words.append(symbols)
        self.times.append(times)
        candidates: list[Pair | int] = [*pairwise(symbols), *(symbol for symbol in symbols if symbol in self.pending)]
        for candidate in candidates:
            self.counts[candidate] += times
            self.places[candidate].add(word_index)

    def begin(self) -> None:
        """Offer all candidates."""
        for candidate in self.counts:
            self._offer(candidate)

    def step(self) -> Piece | None:
        """Learn the next token and merge it in all words; return None if no candidate is left."""
        while self.heap:
            negative, _, candidate = heapq.heappop(self.heap)
            # A candidate is offered again when its count changes, or when its pending character becomes a token.
            if -negative != self._gain(candidate) or not self._allowed(candidate):
                continue
            return self._accept_character(candidate) if isinstance(candidate, int) else self._merge(candidate)
        return None

    def _symbol(self, text: str, parts: tuple[int, ...] | None) -> int:
        """Return the symbol of `text`, a new one if needed. With `parts` None it is a barrier that is never merged."""
        if text not in self.symbol_of:
            self.symbol_of[text] = len(self.texts)
            self.texts.append(text)
            self.parts.append(parts or ())
            # Of equally frequent candidates those with pending characters come last.
            self.ids.append(self.base.vocab.get(text, _LAST + ord(text[0]) if text else _LAST))
            if text not in self.base.vocab and parts is not None:
                self.pending.add(self.symbol_of[text])
        return self.symbol_of[text]

    def _gain(self, candidate: Pair | int) -> int:
        """Return the number of tokens by which the candidate shortens the corpus."""
        saved = max(len(self.parts[candidate]) - 1, 1) if isinstance(candidate, int) else 1
        return self.counts[candidate] * saved

    def _offer(self, candidate: Pair | int) -> None:
        """Add a candidate to the heap if it is frequent enough and allowed."""
        if self.counts[candidate] >= MIN_COUNT and self._allowed(candidate):
            symbols = (candidate,) if isinstance(candidate, int) else candidate
            heapq.heappush(
                self.heap, (-self._gain(candidate), tuple(self.ids[symbol] for symbol in symbols), candidate)
            )

    def _allowed(self, candidate: Pair | int) -> bool:
        """True if the candidate may become a token."""
        if isinstance(candidate, int):
            return candidate in self.pending and self.texts[candidate] not in self.taken
        left, right = self.texts[candidate[0]], self.texts[candidate[1]]
        joined = left + right
        if (
            candidate[0] in self.pending
            or candidate[1] in self.pending
            or "" in (left, right)
            or len(joined) > _LONGEST
        ):
            return False
        # A token may begin with blanks or consist of them, but has none inside.
        inside = _BLANK in joined.lstrip(_BLANK)
        return not (inside or joined in self.base.vocab or joined in self.symbol_of or joined in self.taken)

    def _accept_character(self, symbol: int) -> Piece:
        """Make a pending character a token, and offer its pairs."""
        self._assign_id(symbol)
        for word_index in self.places[symbol]:
            word = self.words[word_index]
            for pair in pairwise(word):
                if symbol in pair:
                    self._offer(pair)
        return Piece(self.texts[symbol], None, self.parts[symbol], self.counts[symbol])

    def _assign_id(self, symbol: int) -> None:
        """Give the symbol the next free id."""
        self.pending.discard(symbol)
        self.ids[symbol] = self.base.size + self.learnt
        self.learnt += 1

    def _merge(self, pair: Pair) -> Piece:
        """Make the pair a token, and merge it in all words."""
        left, right = pair
        count, merge = self.counts[pair], (self.texts[left], self.texts[right])
        new = self._symbol("".join(merge), self.parts[left] + self.parts[right])
        self._assign_id(new)
        changed: set[Pair] = set()
        for word_index in sorted(self.places[pair]):
            changed |= self._replace(word_index, pair, new)
        for candidate in changed:
            self._offer(candidate)
        return Piece(self.texts[new], merge, self.parts[new], count)

    def _replace(self, word_index: int, pair: Pair, new: int) -> set[Pair]:
        """Merge `pair` into `new` in one word; return the pairs with changed counts."""
        word, times = self.words[word_index], self.times[word_index]
        merged = list(_merged(word, pair, new))
        before, after = Counter(pairwise(word)), Counter(pairwise(merged))
        self.words[word_index] = merged
        for candidate, occurrences in before.items():
            self.counts[candidate] -= occurrences * times
            if candidate not in after:
                self.places[candidate].discard(word_index)
        for candidate, occurrences in after.items():
            self.counts[candidate] += occurrences * times
            self.places[candidate].add(word_index)
        return {candidate for candidate in (*before, *after) if before[candidate] != after[candidate]}


def _merged(word: list[int], pair: Pair, new: int) -> Iterable[int]:
    """Yield the symbols of `word` with each `pair` replaced by `new`."""
    index = 0
    while index < len(word):
        if index + 1 < len(word) and (word[index], word[index + 1]) == pair:
            yield new
            index += 2
        else:
            yield word[index]
            index += 1


def _tokenize(base: Base, word: str) -> list[tuple[str, tuple[int, ...] | None]]:
    """Split `word` into old tokens and unknown characters, each with the ids of the old tokens of the same text.

    An unknown character has the ids of its byte tokens, or none. Control characters and white space become a barrier
    ("", None).
    """
    result: list[tuple[str, tuple[int, ...] | None]] = []
    pending_text = ""
    for letter in word:
        if letter in base.vocab:
            pending_text += letter
            continue
        result += _old_tokens(base, pending_text)
        pending_text = ""
        control = unicodedata.category(letter)[0] == "C" or letter.isspace()
        result.append(("", None) if control else (letter, _byte_tokens(base, letter)))
    return result + _old_tokens(base, pending_text)


def _old_tokens(base: Base, text: str) -> list[tuple[str, tuple[int, ...] | None]]:
    """Tokenize `text`, whose characters are all in the vocabulary."""
    return [(token.value, (token.id,)) for token in base.backend.model.tokenize(text)] if text else []


def _byte_tokens(base: Base, letter: str) -> tuple[int, ...]:
    """Return the ids of the byte tokens of `letter`; none if the vocabulary lacks one."""
    names = [f"<0x{byte:02X}>" for byte in letter.encode()]
    return tuple(base.vocab[name] for name in names) if all(name in base.vocab for name in names) else ()
