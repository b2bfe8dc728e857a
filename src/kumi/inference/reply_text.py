"""The text of a reply: as a whole, and as it grows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kumi.data.tokenizer import Tokenizer

# Tokens of the prompt that are decoded before a reply: some tokenizers drop the space before the first word of a text.
_CONTEXT = 8
# Stands for the bytes of an incomplete character.
_REPLACEMENT = "\ufffd"


def decoder_of(tokenizer: Tokenizer) -> Callable[[Sequence[int]], str]:
    """Return a function from ids to text without special tokens, as transformers' pipelines show replies."""
    backend = tokenizer.backend
    return lambda ids: str(backend.decode(list(ids), skip_special_tokens=True))


def reply_text(
    decode: Callable[[Sequence[int]], str], prompt: Sequence[int], ids: Sequence[int], stop_strings: Sequence[str] = ()
) -> str:
    """Return the text of the reply `ids` to the ids of a prompt, up to the first of `stop_strings` in it."""
    before = list(prompt[-_CONTEXT:])
    start, whole = decode(before), decode([*before, *ids])
    text = whole[len(start) :] if whole.startswith(start) else decode(ids)
    ends = [index for stop in stop_strings if (index := text.find(stop)) >= 0]
    return text[: min(ends)] if ends else text


class TextStream:
    """The text of one reply as it grows. Text that later tokens may still change is held back."""

    def __init__(
        self, decode: Callable[[Sequence[int]], str], prompt: Sequence[int], stop_strings: Sequence[str] = ()
    ) -> None:
        self._decode, self._prompt, self._stops = decode, prompt, stop_strings
        self.text = ""

    def grow(self, ids: Sequence[int], *, ended: bool = False) -> str:
        """Return the text that is new since the last call; `ids`, the reply so far, begin with those of that call.

        ended: the reply is complete, so that no later token can change its text.
        """
        text = reply_text(self._decode, self._prompt, ids, self._stops)
        if not ended:
            text = text.rstrip(_REPLACEMENT)
            text = text[: len(text) - self._begun_stop_length(text)]
        if not text.startswith(self.text):  # the tokenizer joins what is shown already with later text
            return ""
        new, self.text = text[len(self.text) :], text
        return new

    def _begun_stop_length(self, text: str) -> int:
        """Return the length of the longest end of `text` with which a stop string begins."""
        lengths = (size for stop in self._stops for size in range(1, len(stop)) if text.endswith(stop[:size]))
        return max(lengths, default=0)
