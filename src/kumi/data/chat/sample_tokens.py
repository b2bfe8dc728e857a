"""Tokens of a rendered sample, each with its mask and turn.

A text is encoded in pieces. It is cut where a reply begins, because inference encodes the prompt alone, and before
added tokens, where tokenizers cut it too. Pieces that the samples of a conversation share are encoded once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

from kumi.data.chat.as_generated import Message, Sample, excerpt
from kumi.data.chat.control_tokens import ControlTokens, unmarked, without_added_tokens
from kumi.data.chat.masked import MaskedSequence, RowRefused
from kumi.data.chat.segments import message_segments
from kumi.data.tokenizer import PIECE, Tokenizer

_MAX_TURN = 2**16 - 1
# Before a piece, and its tokens dropped again, a newline keeps tokenizers from adding the space that begins a text.
_ANCHOR = "\n"


class _Piece(NamedTuple):
    """A part of a text, without marks.

    spelt: whether it spells control tokens, so that none of its characters become an added token.
    before: the kind of text before it: "" at the start and at cuts that change nothing, else "text" or "token".
    """

    text: str
    spelt: bool = False
    before: str = ""


class _Tokens(NamedTuple):
    """Ids of a piece; `encoding` has `dropped` tokens of `shift` characters before them."""

    ids: list[int]
    encoding: Any
    dropped: int
    shift: int

    def at(self, character: int) -> int:
        """Return the number of the token with `character`, or of the next that has characters."""
        for position in range(character + self.shift, character + self.shift + 16):
            token = self.encoding.char_to_token(position)
            if token is not None:
                return max(0, int(token) - self.dropped)
        return len(self.ids)


class SampleTokens:
    """Encodes the samples of one row at a time."""

    def __init__(self, tokenizer: Tokenizer, controls: ControlTokens) -> None:
        self._backend, self._controls = tokenizer.backend, controls
        self._bos = tokenizer.bos_id
        self._cache: dict[_Piece, _Tokens] = {}
        self._newline = self._ids(_ANCHOR)
        # Before which kinds of text a piece needs the anchor.
        alone, token = self._ids("kumi"), min(controls.safe, default="")
        after = {"text": self._ids(f"{_ANCHOR}kumi")[len(self._newline) :], "token": self._ids(f"{token}kumi")[1:]}
        self._anchored = {name for name, ids in after.items() if ids != alone and (token or name == "text")}

    def clear(self) -> None:
        """Forget the pieces of the last row."""
        self._cache = {}

    def encode(self, sample: Sample, messages: Sequence[Message], mark: str = "") -> MaskedSequence:
        """Return the tokens of `sample`; `mark` is inside each control token that the row spells, "" if it spells none.

        Raise RowRefused if it begins with two BOS tokens or has more than 4 Mi characters, if a stop token is no token,
        or if the tokenizer makes control tokens of text.
        """
        text = sample.text
        if len(text) > PIECE:
            raise RowRefused("too-long", f"the conversation has {len(text)} characters; the limit is {PIECE}")
        segments = message_segments(sample, messages, self._controls.added)
        stops = {reply.stop: text[reply.stop : reply.end] for reply in sample.replies}
        ids: list[int] = []
        mask: list[int] = []
        turns: list[int] = []
        number, nearest = 0, 0
        for start, end, piece in self._pieces(sample, mark):
            tokens = self._encoded(piece)
            count = len(tokens.ids)
            if start in stops and tokens.ids[:1] != [self._backend.token_to_id(stops[start])]:
                raise RowRefused("no-stop-token", f"{stops[start]!r} ends a reply, but the tokenizer splits it there")
            while nearest < len(segments) and segments[nearest].end <= start:
                number = segments[nearest].number
                nearest += 1
            masks, numbers = [0] * count, [number] * count
            for segment in segments[nearest:]:
                if segment.start >= end:
                    break
                first, last = 0, count
                if segment.start > start:
                    first = tokens.at(len(unmarked(text[start : segment.start], mark)))
                if segment.end < end:
                    last = tokens.at(len(unmarked(text[start : segment.end], mark)) - 1) + 1
                masks[first:last] = [segment.mask] * (last - first)
                numbers[first:] = [min(segment.number, _MAX_TURN)] * (count - first)
            ids += tokens.ids
            mask += masks
            turns += numbers
        # Some templates, such as Seed-OSS's, begin each message with it.
        if self._bos is not None and ids[:2] == [self._bos] * 2:
            raise RowRefused("two-bos", f"the rendering begins with two BOS tokens: {excerpt(text)}")
        return MaskedSequence(ids, mask, turns)

    def plain(self, text: str, before: str = "", spelt: bool = False) -> list[int]:
        """Return the tokens of `text`; of none of its added tokens if it is `spelt`."""
        return self._encoded(_Piece(text, spelt, before)).ids

    def _pieces(self, sample: Sample, mark: str) -> Iterator[tuple[int, int, _Piece]]:
        """Yield the pieces of a sample with their positions in its text."""
        text, cuts = sample.text, self._controls.cuts
        starts = {reply.start for reply in sample.replies}
        borders = sorted({0, len(text), *starts, *(reply.stop for reply in sample.replies)})
        for begin, finish in pairwise(borders):
            inner = [match.start() for match in cuts.finditer(text, begin, finish)]
            for start, end in pairwise(dict.fromkeys([begin, *inner, finish])):
                before = ""
                if start in starts and inner[:1] != [start]:
                    before = "token" if self._controls.ends_with_token(text[:start]) else "text"
                if mark and unmarked(text[start:end], mark) != text[start:end]:
                    yield from self._spelt_pieces(text, start, end, before, mark)
                else:
                    yield start, end, _Piece(text[start:end], False, before)

    def _spelt_pieces(self, text: str, start: int, end: int, before: str, mark: str) -> Iterator[Any]:
        """Yield parts of `text[start:end]`: added tokens that the template or the assistant writes, and the rest."""
        borders = [start, end]
        for match in self._controls.added.finditer(text, start, end):
            borders += [match.start(), match.end()]
        for first, last in pairwise(sorted(set(borders))):
            part = text[first:last]
            written = self._controls.added.fullmatch(part) is not None
            yield first, last, _Piece(unmarked(part, mark), not written, before if first == start else "token")

    def _encoded(self, piece: _Piece) -> _Tokens:
        if piece not in self._cache:
            self._cache[piece] = self._encode(piece)
        return self._cache[piece]

    def _encode(self, piece: _Piece) -> _Tokens:
        backend = self._without_added if piece.spelt else self._backend
        tokens = None
        if piece.before in self._anchored:
            encoding = backend.encode(_ANCHOR + piece.text, add_special_tokens=False)
            if encoding.ids[: len(self._newline)] == self._newline:
                tokens = _Tokens(encoding.ids[len(self._newline) :], encoding, len(self._newline), len(_ANCHOR))
        if tokens is None:
            encoding = backend.encode(piece.text, add_special_tokens=False)
            tokens = _Tokens(encoding.ids, encoding, 0, 0)
        special = self._controls.special_ids
        if not special.isdisjoint(tokens.ids[1:]) or (piece.spelt and not special.isdisjoint(tokens.ids)):
            written = 0 if piece.spelt else len(self._controls.special.findall(piece.text))
            if sum(number in special for number in tokens.ids) > written:
                raise RowRefused(
                    "control-token", f"the tokenizer makes a control token of the text {excerpt(piece.text)}"
                )
        return tokens

    def _ids(self, text: str) -> list[int]:
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    @cached_property
    def _without_added(self) -> Any:
        return without_added_tokens(self._backend)
