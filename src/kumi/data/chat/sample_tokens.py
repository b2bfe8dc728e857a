"""Tokens of a sample (the rendered beginning of a conversation with its trained replies), each with its mask and turn.

A text is encoded in pieces. It is cut where a reply begins, because inference encodes the prompt alone, and before
added tokens, where tokenizers cut it too. Pieces that the samples of a conversation share are encoded once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice, pairwise, takewhile

from kumi.data.chat.as_generated import Message, Sample, excerpt
from kumi.data.chat.control_tokens import ControlTokens, unmarked
from kumi.data.chat.masked import MaskedSequence, RowRefused
from kumi.data.chat.message_texts import NOWHERE, Places, message_texts
from kumi.data.chat.piece_tokens import Piece, PieceTokens
from kumi.data.tokenizer import PIECE, Tokenizer

_MAX_TURN = 2**16 - 1


class SampleTokens:
    """Encodes the samples of one row at a time."""

    def __init__(self, tokenizer: Tokenizer, controls: ControlTokens) -> None:
        self._backend, self._bos, self._controls = tokenizer.backend, tokenizer.bos_id, controls
        self._tokens = PieceTokens(tokenizer, controls)

    def clear(self) -> None:
        """Forget the pieces of the last row."""
        self._tokens.clear()

    def encode(
        self, sample: Sample, messages: Sequence[Message], mark: str = "", places: Places = NOWHERE
    ) -> MaskedSequence:
        """Return the tokens of `sample`; `mark` is inside each control token that the row spells, "" if it spells none.

        `places` are those of `message_texts`.
        Raise RowRefused if the sample begins with two BOS tokens or has more than 4 Mi characters, if the tokenizer
        splits a stop token, or if it makes control tokens of text.
        """
        text = sample.text
        if len(text) > PIECE:
            raise RowRefused("too-long", f"the conversation has {len(text)} characters; the limit is {PIECE}")
        segments = message_texts(sample, messages, self._controls.added, places)
        stops = {reply.stop: text[reply.stop : reply.end] for reply in sample.replies}
        pieces = list(self._pieces(sample, mark))
        encoded = self._tokens.encode([piece for _, _, piece in pieces])
        ids: list[int] = []
        mask: list[int] = []
        turns: list[int] = []
        turn, nearest = 0, 0  # the turn of the last text before the piece, and the index of the segment after it
        for (start, end, piece), new in zip(pieces, encoded, strict=True):
            if start in stops and new[:1] != [self._backend.token_to_id(stops[start])]:
                raise RowRefused("no-stop-token", f"{stops[start]!r} ends a reply, but the tokenizer splits it there")
            while nearest < len(segments) and segments[nearest].end <= start:
                turn = segments[nearest].number
                nearest += 1
            new_mask, new_turns = [0] * len(new), [turn] * len(new)
            for segment in takewhile(lambda segment: segment.start < end, islice(segments, nearest, None)):  # noqa: B023
                before, until = text[start : max(start, segment.start)], text[start : min(segment.end, end)]
                first, last = self._tokens.tokens_of(piece, len(unmarked(before, mark)), len(unmarked(until, mark)))
                new_mask[first:last] = [segment.mask] * (last - first)
                new_turns[first:] = [min(segment.number, _MAX_TURN)] * (len(new) - first)
            ids += new
            mask += new_mask
            turns += new_turns
        # Only two at the beginning are refused: some templates, such as Seed-OSS's, begin each message with BOS.
        if self._bos is not None and ids[:2] == [self._bos] * 2:
            raise RowRefused("two-bos", f"the rendering begins with two BOS tokens: {excerpt(text)}")
        return MaskedSequence(ids, mask, turns)

    def _pieces(self, sample: Sample, mark: str) -> Iterator[tuple[int, int, Piece]]:
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
                    yield start, end, Piece(text[start:end], False, before)

    def _spelt_pieces(
        self, text: str, start: int, end: int, before: str, mark: str
    ) -> Iterator[tuple[int, int, Piece]]:
        """Yield parts of `text[start:end]`: added tokens that the template or the assistant writes, and the rest."""
        borders = [start, end]
        for match in self._controls.added.finditer(text, start, end):
            borders += [match.start(), match.end()]
        for first, last in pairwise(sorted(set(borders))):
            part = text[first:last]
            written = self._controls.added.fullmatch(part) is not None
            yield first, last, Piece(unmarked(part, mark), not written, before if first == start else "token")
