"""Generate text with a loaded model: prompts in, replies as text out."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from kumi.errors import ConfigError
from kumi.inference.batched_decoder import BatchedDecoder, OnToken, Reply
from kumi.inference.conversation_cache import ConversationCache
from kumi.inference.generation_settings import Flags, resolve_sampling
from kumi.inference.load_model import LoadedModel, ModelTexts
from kumi.inference.prompt_encoder import Prompt, PromptEncoder
from kumi.inference.reply_text import TextStream, decoder_of, reply_text
from kumi.inference.sampling import Sampling
from kumi.spec.model import ModelSpec

# Sequences that are decoded at once, unless a user says so or memory is short.
BATCH_SIZE = 8


@dataclass(frozen=True)
class TextReply:
    """A reply to one prompt.

    - `prompt`: index of the prompt.
    - `sample`: number of the reply among those to the same prompt, from 0.
    - `text`: without special tokens, up to the stop string that ended it.
    - `ids`: its token ids, without the stop id that ended it.
    - `log_probs`: log-probability of each of `ids` at the temperature (1 if that is 0), in nats.
    - `finish`: "stop" for a stop id or string, "length" at the largest number of tokens.
    """

    prompt: int
    sample: int
    text: str
    ids: list[int]
    log_probs: list[float]
    finish: Literal["stop", "length"]

    @property
    def mean_log_prob(self) -> float | None:
        """The mean of `log_probs`, None for a reply without tokens."""
        return sum(self.log_probs) / len(self.log_probs) if self.log_probs else None


class ReplySettings:
    """How a model takes prompts and draws replies, without its weights.

    flags: settings that replace those of the model.
    use_template: render prompts with the model's chat template, if it has one.
    system: the message that begins each conversation.
    """

    def __init__(
        self, texts: ModelTexts, flags: Flags | None = None, *, use_template: bool = True, system: str | None = None
    ) -> None:
        self.texts, self.tokenizer, self.system = texts, texts.tokenizer, system
        self.template = texts.chat_template if use_template else None
        self._encoder = PromptEncoder(
            texts.tokenizer, self.template, stop_ids=texts.stop_ids, options=texts.chat, system=system
        )
        self.sampling: Sampling = resolve_sampling(flags or Flags(), texts.settings, self._encoder.stop_ids)
        self.decode = decoder_of(texts.tokenizer)

    def encode(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Return the ids of each of `prompts`. Raise as `PromptEncoder.encode` does."""
        return [self.encode_row(prompt, {}, f"prompt {number}") for number, prompt in enumerate(prompts, 1)]

    def encode_row(self, prompt: Prompt, columns: Mapping[str, Any], where: str) -> list[int]:
        """Return the ids of `prompt`, a row with further `columns`. Raise as `PromptEncoder.encode` does."""
        return self._encoder.encode(prompt, columns, where)

    def text(self, prompt: Sequence[int], ids: Sequence[int]) -> str:
        """Return the text of the reply `ids` to the ids of `prompt`."""
        return reply_text(self.decode, prompt, ids, self.sampling.stop_strings)

    def stream(self, prompt: Sequence[int]) -> TextStream:
        """Return an empty stream for the text of a reply to the ids of `prompt`."""
        return TextStream(self.decode, prompt, self.sampling.stop_strings)

    def digest(self) -> str:
        """Return a hash of everything that replies depend on, except the weights and the prompts."""
        sampling = {**asdict(self.sampling), "stop_ids": sorted(self.sampling.stop_ids)}
        if self.sampling.greedy:
            sampling["seed"] = 0
        template = None if self.template is None else self.template.digest
        content = [sampling, self.system, template, self.texts.chat.template_kwargs, self.texts.chat.date]
        content.append(self.tokenizer.digest)
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


class TextGenerator:
    """Generates with a loaded model, `batch_size` sequences at once."""

    def __init__(self, model: LoadedModel, settings: ReplySettings, *, batch_size: int = BATCH_SIZE) -> None:
        self.settings, self.spec = settings, model.decoder.spec
        self._decoder = BatchedDecoder(
            model.decoder, slots=batch_size, max_length=longest_text(self.spec), decode_text=settings.decode
        )

    def generate(
        self, prompts: Sequence[Sequence[int]], *, samples: int = 1, on_token: OnToken | None = None
    ) -> Iterator[TextReply]:
        """Yield `samples` replies to each of the encoded `prompts`, as each one ends.

        on_token: called with the index of the prompt, the number of the sample and the ids so far, for each new token.
        Raise ConfigError for several samples of greedy replies, for a prompt that leaves no room, and for ids outside
        the model's vocabulary.
        """
        check_samples(samples, self.settings.sampling)
        check_prompts(prompts, self.spec)
        for reply in self._decoder.generate(prompts, self.settings.sampling, samples=samples, on_token=on_token):
            yield self._text_reply(prompts[reply.prompt], reply)

    def converse(
        self, conversation: ConversationCache, prompt: Sequence[int], *, on_token: OnToken | None = None
    ) -> Iterator[TextReply]:
        """Yield the reply to the encoded `prompt`, computing only the tokens that `conversation` does not have.

        Raise ConfigError as `generate` does.
        """
        check_prompts([prompt], self.spec)
        for reply in self._decoder.converse(conversation, prompt, self.settings.sampling, on_token=on_token):
            yield self._text_reply(prompt, reply)

    def _text_reply(self, prompt: Sequence[int], reply: Reply) -> TextReply:
        text = self.settings.text(prompt, reply.ids)
        return TextReply(reply.prompt, reply.sample, text, reply.ids, reply.log_probs, reply.finish)


def longest_text(spec: ModelSpec) -> int | None:
    """Return the largest number of tokens of prompt and reply together; None for a model without positions."""
    has_positions = spec.learned_positions > 0 or any(layer.attends is not None for layer in spec.layers)
    return spec.max_position_embeddings if has_positions else None


def check_prompts(prompts: Sequence[Sequence[int]], spec: ModelSpec) -> None:
    """Raise ConfigError for a prompt that leaves no room for a reply, or has ids outside the model's vocabulary."""
    longest = longest_text(spec)
    for number, prompt in enumerate(prompts, 1):
        if not prompt:
            raise ConfigError(f"prompt {number}: has no tokens; give at least one character")
        if longest is not None and len(prompt) >= longest:
            raise ConfigError(
                f"prompt {number}: has {len(prompt)} tokens, which leaves no room for a reply in the model's {longest} "
                "positions; shorten it"
            )
        if max(prompt) >= spec.vocab_size:
            raise ConfigError(
                f"prompt {number}: has the token {max(prompt)}, but the model's vocabulary has {spec.vocab_size}; name "
                "the model whose tokenizer this is"
            )


def check_samples(samples: int, sampling: Sampling) -> None:
    """Raise ConfigError for several samples of each prompt if replies are greedy: they would be the same."""
    if samples > 1 and sampling.greedy:
        raise ConfigError(
            f"num_return_sequences={samples}: greedy replies to one prompt are all the same; set temperature above 0"
        )
