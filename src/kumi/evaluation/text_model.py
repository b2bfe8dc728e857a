"""Score and generate texts with a model of token ids."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from kumi.data.tokenizer import Tokenizer
from kumi.evaluation.rolling_windows import rolling_windows
from kumi.evaluation.score_requests import Request, Score
from kumi.inference.prompt_encoder import PromptEncoder
from kumi.inference.sampling import Sampling


class TokenModel(Protocol):
    """A model of token ids, such as `kumi.evaluation.resumed_model.ResumedModel`."""

    @property
    def max_length(self) -> int:
        """The number of tokens that the model reads at most."""

    def score(self, requests: Sequence[Request]) -> list[Score]:
        """Return the score of each of `requests`."""

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[list[int]]:
        """Return the token ids of the reply to each of `prompts`."""


@dataclass(frozen=True)
class TextModel:
    """A model of texts.

    chat: encodes conversations for lm-evaluation-harness; None for a model without a chat template, or if no task has
    conversations.
    stop_ids: ids that end a reply to a plain text.
    encodings: a cache of the ids of texts, for tasks that are evaluated again and again; None for no cache.
    """

    model: TokenModel
    tokenizer: Tokenizer
    chat: PromptEncoder | None = None
    stop_ids: frozenset[int] = field(default_factory=frozenset)
    encodings: dict[tuple[str, bool], array[int]] | None = None

    @property
    def prefix_id(self) -> int:
        """The token before a text without context: the tokenizer's bos, or eos for one without bos.

        Source: lm-evaluation-harness, `HFLM.prefix_token_id`.
        """
        return self.tokenizer.eos_id if self.tokenizer.bos_id is None else self.tokenizer.bos_id

    def encode(self, text: str, *, special: bool | None = None) -> list[int]:
        """Return the ids of `text`, with the special tokens that the tokenizer adds, such as bos.

        `special`: False to add none. By default none are added to a text that spells the prefix token already, as one
        that a chat template has rendered.
        """
        if special is None:
            special = not text.startswith(self.tokenizer.decode([self.prefix_id]))
        if self.encodings is None:
            return self._encode(text, special)
        stored = self.encodings.get((text, special))
        if stored is None:
            stored = self.encodings[text, special] = array("I", self._encode(text, special))
        return stored.tolist()

    def _encode(self, text: str, special: bool) -> list[int]:
        ids: list[int] = self.tokenizer.backend.encode(text, add_special_tokens=special).ids
        return ids

    def pair(self, context: str, continuation: str) -> Request:
        """Return the request for `continuation` after `context`.

        Both are encoded together, so that the tokens are those of the whole text; spaces at the end of the context
        belong to the continuation. Source: lm-evaluation-harness, `TemplateLM._encode_pair`.
        """
        if not context:
            return self._split(self.encode(continuation, special=False), 0)
        stripped = context.rstrip()
        continuation = context[len(stripped) :] + continuation
        return self._split(self.encode(stripped + continuation), len(self.encode(stripped)))

    def _split(self, ids: Sequence[int], at: int) -> Request:
        """Return the request for `ids` from `at`, after the prefix token if nothing is before them."""
        if at == 0 and ids[:1] != [self.prefix_id]:
            return Request((self.prefix_id,), tuple(ids))
        at = max(at, 1)
        return Request(tuple(ids[:at]), tuple(ids[at:]))

    def score_pairs(self, pairs: Sequence[tuple[str, str]]) -> list[Score]:
        """Return the score of each continuation after its context."""
        return self.model.score([self.pair(*texts) for texts in pairs])

    def score_documents(
        self, texts: Sequence[str], *, stride: int | None = None, special: bool | None = False
    ) -> list[tuple[float, int]]:
        """Return the log-prob of each text and its number of tokens, in windows of the model's context.

        `stride`: of the windows; by default half of the context. `special`: as in `encode`.
        """
        length = self.model.max_length
        ids = [self.encode(text, special=special) for text in texts]
        windows = [list(self._windows(document, stride or max(1, length // 2))) for document in ids]
        scores = iter(self.model.score([window for document in windows for window in document]))
        sums = [sum(next(scores).log_prob for _ in document) for document in windows]
        return list(zip(sums, map(len, ids), strict=True))

    def _windows(self, ids: Sequence[int], stride: int) -> Iterator[Request]:
        return rolling_windows(ids, self.prefix_id, self.model.max_length, stride)

    def replies(self, prompts: Sequence[str], sampling: Sampling) -> list[str]:
        """Return the reply to each prompt, a text to continue; see `replies_to`."""
        ids = [self.encode(prompt) or [self.prefix_id] for prompt in prompts]
        return self.replies_to(ids, replace(sampling, stop_ids=sampling.stop_ids | self.stop_ids))

    def replies_to(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[str]:
        """Return the reply to the ids of each prompt, up to the first of the stop strings, without special tokens.

        Prompts that leave no room for `max_new_tokens` lose their first tokens.
        """
        room = max(1, self.model.max_length - sampling.max_new_tokens)
        ids = [prompt[-room:] for prompt in prompts]
        texts = [
            str(self.tokenizer.backend.decode(reply, skip_special_tokens=True))
            for reply in self.model.generate(ids, sampling)
        ]
        return [_before(text, sampling.stop_strings) for text in texts]


def _before(text: str, stops: Sequence[str]) -> str:
    """Return `text` up to the first of `stops` in it."""
    return text[: min((text.index(stop) for stop in stops if stop in text), default=len(text))]
