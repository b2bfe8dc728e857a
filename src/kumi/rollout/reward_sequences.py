"""The tokens of a prompt with its reply as a reward model reads them.

The key `reads` of the reward chooses them:

tokens   the policy's tokens of the prompt and of the reply, with the token that ended the reply
reply    the tokens that the reward model's own tokenizer and chat template make of both, up to the token that ends the
         reply; a reply that was cut has no such token
whole    all tokens that the reward model's template renders, as transformers' apply_chat_template

The score is read at the last token. As in transformers' sequence classifiers, that is the last token other than the
padding token of the reward model's config.json, even if the text itself ends with the padding token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kumi.data.chat.encode import ConversationEncoder
from kumi.data.chat.masked import TRAINED, RowRefused
from kumi.data.formats import Format, PlainText, to_example
from kumi.rewards import Unscored
from kumi.rollout.group import GeneratedReply
from kumi.rollout.prompt_sampler import Prompt

# The format of the rows of one prompt and one reply that are given to an encoder.
_PAIRS = Format("prompt-completion", forced=True)


@dataclass(frozen=True)
class TokenLimits:
    """The limits of the tokens that a reward model reads.

    vocab_size: all ids are below it. longest: the largest number of tokens of a sequence. padding: the id of the
        padding token; None without one.
    """

    vocab_size: int
    longest: int
    padding: int | None

    def cut(self, ids: Sequence[int]) -> list[int] | Unscored:
        """Return `ids` up to the token at which the score is read, or why the model cannot read them."""
        outside = next((token for token in ids if not 0 <= token < self.vocab_size), None)
        if outside is not None:
            return Unscored(f"token {outside} is outside of the reward model's vocabulary of {self.vocab_size}")
        if len(ids) > self.longest:
            return Unscored(
                f"prompt and reply have {len(ids)} tokens, and the reward model reads at most {self.longest}"
            )
        end = next((place for place in reversed(range(len(ids))) if ids[place] != self.padding), 0)
        return list(ids[: end + 1])


class PolicyTokens:
    """Sequences of the policy's own tokens."""

    def __init__(self, limits: TokenLimits) -> None:
        self._limits = limits

    def sequence(self, prompt: Prompt, reply: GeneratedReply, text: str) -> list[int] | Unscored:
        """Return the tokens of `prompt` and `reply`, or why the model cannot read them; `text` is not used."""
        return self._limits.cut([*prompt.ids, *reply.ids.tolist()])


class RenderedTokens:
    """Sequences of the reward model's own tokens, as `encoder` renders them.

    whole: True for all of the rendering of a conversation, False for the part up to the token that ends the reply.
        Plain texts are not rendered by a template, and end with the reply in both cases.
    """

    def __init__(self, encoder: ConversationEncoder, limits: TokenLimits, *, whole: bool) -> None:
        self._encoder, self._limits, self._whole = encoder, limits, whole

    def sequence(self, prompt: Prompt, reply: GeneratedReply, text: str) -> list[int] | Unscored:
        """Return the tokens of `prompt` and of the `text` of `reply`, or why the model cannot read them."""
        try:
            return self._limits.cut(self._encoded(prompt.row, text, truncated=reply.truncated))
        except RowRefused as refused:
            return Unscored(refused.reason)

    def _encoded(self, row: Mapping[str, Any], text: str, *, truncated: bool) -> list[int]:
        asked = row["prompt"]
        answer: Any = text if isinstance(asked, str) else [{"role": "assistant", "content": text}]
        values = {"prompt": asked, "completion": answer, "tools": row.get("tools")}
        example = to_example(_PAIRS, values, "a reply", 0)
        [side] = example.sides
        if self._whole and not isinstance(side, PlainText):
            return list(self._encoder.whole(side).ids)
        *_, unit = self._encoder.encode(example)
        [sequence] = unit.sequences
        # The token that ends the reply is the last one that the mask marks as trained; a template may write more.
        end = max(place for place, mask in enumerate(sequence.mask) if mask & TRAINED)
        return list(sequence.ids[: end if truncated else end + 1])


Sequences = PolicyTokens | RenderedTokens
