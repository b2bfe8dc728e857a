"""Encode pieces of a text to the ids that they have within the text, and find the tokens of their characters."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

from kumi.data.chat.as_generated import excerpt
from kumi.data.chat.control_tokens import ControlTokens, without_added_tokens
from kumi.data.chat.masked import RowRefused
from kumi.data.tokenizer import Tokenizer

# A newline before a piece keeps tokenizers from adding the space that begins a text; its tokens are dropped again.
_ANCHOR = "\n"
# Texts of at most `_SHORT` characters before or after a message, such as the template's, are encoded alone to count
# their tokens; the tokens of up to `_SHORT_TEXTS` such texts are kept.
_SHORT, _SHORT_TEXTS = 1024, 512


class Piece(NamedTuple):
    """A part of a text, without the marks that `kumi.data.chat.control_tokens` puts into it.

    spelt: whether it spells control tokens, so that none of its characters become an added token.
    before: the kind of text before it: "" at the start and at cuts that change nothing, else "text" or "token".
    """

    text: str
    spelt: bool = False
    before: str = ""


class PieceTokens:
    """Encodes the pieces of one row at a time; each text once."""

    def __init__(self, tokenizer: Tokenizer, controls: ControlTokens) -> None:
        self._backend, self._controls = tokenizer.backend, controls
        self._cache: dict[Piece, list[int]] = {}
        self._short: dict[str, list[int]] = {}
        self._newline = self._ids(_ANCHOR)
        # A piece needs the anchor after the kinds of text after which a word has other ids than at the start of a text.
        alone, token = self._ids("kumi"), min(controls.safe, default="")
        after = {"text": self._ids(f"{_ANCHOR}kumi")[len(self._newline) :], "token": self._ids(f"{token}kumi")[1:]}
        self._anchored = {name for name, ids in after.items() if ids != alone and (token or name == "text")}

    def clear(self) -> None:
        """Forget the pieces of the last row."""
        self._cache = {}

    def encode(self, pieces: Sequence[Piece]) -> list[list[int]]:
        """Return the ids of each piece. Raise RowRefused if the tokenizer makes control tokens of text."""
        new = [piece for piece in dict.fromkeys(pieces) if piece not in self._cache]
        plain = [piece for piece in new if not piece.spelt and piece.before not in self._anchored]
        encodings = self._backend.encode_batch_fast([piece.text for piece in plain], add_special_tokens=False)
        self._cache.update((piece, encoding.ids) for piece, encoding in zip(plain, encodings, strict=True))
        for piece in new:
            if piece not in self._cache:
                encoding, dropped, _ = self._encoding(piece)
                self._cache[piece] = encoding.ids[dropped:]
            self._check(piece, self._cache[piece])
        return [self._cache[piece] for piece in pieces]

    def tokens_of(self, piece: Piece, first: int, end: int) -> tuple[int, int]:
        """Return the first token and the end of the tokens with characters `first` to `end` of an encoded piece."""
        text, ids = piece.text, self._cache[piece]
        head, tail = text[:first], text[end:]
        if len(head) <= _SHORT and len(tail) <= _SHORT and not piece.spelt and piece.before not in self._anchored:
            before, after = self._short_ids(head), self._short_ids(tail)
            start, stop = len(before), len(ids) - len(after)
            if start <= stop and ids[:start] == before and ids[stop:] == after:
                return start, stop
        # A token has characters of both sides, or the tokenizer encodes a part in another way than the whole.
        encoding, dropped, shift = self._encoding(piece)
        start = 0 if not head else _token_at(encoding, first + shift, dropped, len(ids))
        stop = len(ids) if not tail else min(len(ids), _token_at(encoding, end - 1 + shift, dropped, len(ids)) + 1)
        return start, max(start, stop)

    def _encoding(self, piece: Piece) -> tuple[Any, int, int]:
        """Return the encoding of a piece, and how many of its first tokens and characters are those of the anchor."""
        backend = self._without_added if piece.spelt else self._backend
        if piece.before in self._anchored:
            encoding = backend.encode(_ANCHOR + piece.text, add_special_tokens=False)
            if encoding.ids[: len(self._newline)] == self._newline:
                return encoding, len(self._newline), len(_ANCHOR)
        return backend.encode(piece.text, add_special_tokens=False), 0, 0

    def _check(self, piece: Piece, ids: Sequence[int]) -> None:
        """Raise RowRefused if `ids` have more special tokens than the template writes in the piece."""
        special = self._controls.special_ids
        # Nearly all pieces have none, or begin with their only one.
        begins = not piece.spelt and self._controls.special.match(piece.text) is not None
        if special.isdisjoint(ids[1:] if begins else ids):
            return
        written = 0 if piece.spelt else len(self._controls.special.findall(piece.text))
        if sum(token_id in special for token_id in ids) > written:
            raise RowRefused("control-token", f"the tokenizer makes a control token of the text {excerpt(piece.text)}")

    def _short_ids(self, text: str) -> list[int]:
        """Return the ids of a short text, from those that are kept if possible."""
        if not text:
            return []
        if text not in self._short:
            if len(self._short) >= _SHORT_TEXTS:
                self._short = {}
            self._short[text] = self._ids(text)
        return self._short[text]

    def _ids(self, text: str) -> list[int]:
        return list(self._backend.encode(text, add_special_tokens=False).ids)

    @cached_property
    def _without_added(self) -> Any:
        return without_added_tokens(self._backend)


def _token_at(encoding: Any, character: int, dropped: int, count: int) -> int:
    """Return the number of the token with `character`, or with the first of the 15 after it that has a token.

    `count` if none has.
    """
    for position in range(character, character + 16):
        token = encoding.char_to_token(position)
        if token is not None:
            return max(0, int(token) - dropped)
    return count
