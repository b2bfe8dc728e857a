"""Prompts to token ids: conversations with the model's chat template, and plain text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kumi.data.chat.control_tokens import ControlTokens
from kumi.data.chat.encode import ConversationEncoder
from kumi.data.chat.masked import RowRefused
from kumi.data.chat.sandbox import Renderer
from kumi.data.chat.template import ChatTemplate, find_template, load_tokens
from kumi.data.formats import Format, PlainText, to_example
from kumi.data.tokenizer import Tokenizer
from kumi.errors import ConfigError
from kumi.spec.data_source import ChatOptions

# A text, or messages with "role" and "content", as transformers' pipelines take them.
Prompt = str | Sequence[Mapping[str, Any]]

# The format of rows of prompts; forced: the kind of a row does not have to be recognised by its columns.
_PROMPT_FORMAT = Format("prompt", forced=True)


class PromptEncoder:
    """Encodes prompts as the model was trained to read them.

    template: the chat template; None for plain text, to which the tokenizer adds its special tokens, such as bos.
    stop_ids: ids that end a reply. The attribute also has the token that ends a turn in the template.
    system: a message that begins each conversation without one of its own.

    With a template, a message that spells a control token, such as "<|im_end|>", is encoded as text, so that it does
    not end its turn. In plain text such a spelling is the control token. Raise ConfigError for a system message
    without a template, and for a template that cannot be used.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        *,
        stop_ids: frozenset[int],
        options: ChatOptions | None = None,
        system: str | None = None,
    ) -> None:
        if template is None and system is not None:
            raise ConfigError(
                f"{tokenizer.folder}: a system message needs a chat template, and the tokenizer has none or it is "
                "turned off; put the text into the prompt"
            )
        self._tokenizer, self._template, self._system = tokenizer, template, system
        self.stop_ids = stop_ids
        if template is None:
            return
        options = options or ChatOptions()
        self._renderer = Renderer(
            template,
            load_tokens(tokenizer.folder),
            options.template_kwargs,
            options.date,
            timeout_s=options.timeout_s,
            memory_gib=options.memory_gib,
        )
        self.stop_ids |= _turn_end(self._renderer, tokenizer, template)
        added = tokenizer.backend.get_added_tokens_decoder()
        stops = [added[token_id].content for token_id in sorted(self.stop_ids) if token_id in added]
        self._encoder = ConversationEncoder(self._renderer, tokenizer, stops, options.turns)

    def encode(self, prompt: Prompt, row: Mapping[str, Any] | None = None, where: str = "the prompt") -> list[int]:
        """Return the ids of a prompt: with a template, up to the beginning of the reply.

        row: further columns, such as "tools" and "chat_template_kwargs". Raise ConfigError, which begins with `where`,
        for a prompt that cannot be read or rendered, and for messages if there is no template.
        """
        if self._template is None:
            if not isinstance(prompt, str):
                raise ConfigError(
                    f"{where}: has messages, but {self._tokenizer.folder} has no chat template or it is turned off; "
                    "give text"
                )
            return list(self._tokenizer.backend.encode(prompt).ids)
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(item) for item in prompt]
        if self._system is not None and (not messages or messages[0].get("role") not in ("system", "developer")):
            messages.insert(0, {"role": "system", "content": self._system})
        try:
            example = to_example(_PROMPT_FORMAT, {**(row or {}), "prompt": messages}, where, 0)
            assert not isinstance(example.sides[0], PlainText), "messages are a conversation"
            [unit] = self._encoder.encode(example)
        except RowRefused as refused:
            raise ConfigError(f"{where}: {refused.reason}; change it, or turn the chat template off") from None
        return list(unit.sequences[0].ids)

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Return the text of a conversation up to the beginning of the reply, for programs that encode it themselves.

        Such a program reads the spelling of a control token in a message as the control token. Raise ConfigError for
        messages that the template refuses.
        """
        try:
            self._renderer.limits.start()
            return self._renderer.render(messages, prompt=True)
        except RowRefused as refused:
            raise ConfigError(
                f"a prompt cannot be rendered: {refused.reason}; change the prompt, or leave the chat template out"
            ) from None
        finally:
            self._renderer.limits.end()


def conversation_encoder(tokenizer: Tokenizer, options: ChatOptions, stop_ids: frozenset[int]) -> PromptEncoder | None:
    """Return the encoder of conversations for the template of `options`, or else of the tokenizer.

    Return None if neither has a template.

    stop_ids: ids that end a reply, besides the token that ends a turn.
    """
    template = find_template(options, tokenizer.folder)
    return None if template is None else PromptEncoder(tokenizer, template, stop_ids=stop_ids, options=options)


def _turn_end(renderer: Renderer, tokenizer: Tokenizer, template: ChatTemplate) -> frozenset[int]:
    """Return the id of the special token that the template writes after a reply, as a set; empty if it writes none."""
    reply = "kumi"
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": reply}]
    try:
        text = renderer.render(messages)
    except RowRefused:  # a template that needs more than these messages
        return frozenset()
    end = text.rfind(reply)
    controls = ControlTokens(tokenizer, template.text, ())
    match = None if end < 0 else controls.special.match(text[end + len(reply) :].lstrip())
    token_id = None if match is None else tokenizer.backend.token_to_id(match[0])
    return frozenset() if token_id is None else frozenset({token_id})
