"""Encode examples of all kinds: conversations as they would be generated, and plain prompts with completions.

A sample is a rendering of the beginning of a conversation, with the replies that are trained in it; a conversation has
one or several (see `kumi.data.chat.as_generated`). The result for a sample, or for both sides of a preference, is a
unit: what packing puts into a row of a batch as a whole."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from kumi.data.chat.as_generated import (
    Markup,
    Message,
    Render,
    Reply,
    Sample,
    alternatives,
    check_prompt,
    contains,
    excerpt,
    split_samples,
)
from kumi.data.chat.control_tokens import ControlTokens, spells, unmarked
from kumi.data.chat.limits import ERROR
from kumi.data.chat.masked import TRAINED, EncodedUnit, MaskedSequence, RowRefused
from kumi.data.chat.message_texts import MessageText, Places, message_texts
from kumi.data.chat.sample_tokens import SampleTokens
from kumi.data.chat.short_texts import short_places
from kumi.data.formats.example import ROLES, Conversation, Example, PlainText
from kumi.data.tokenizer import Tokenizer
from kumi.errors import ConfigError
from kumi.spec.data_source import TURNS, ChatOptions

# An argument of some templates: inference may set it, to False or True, when it renders the prompt of a reply.
MODE = "enable_thinking"


class ChatRenderer(Protocol):
    """As `kumi.data.chat.sandbox.Renderer`. kwargs: the arguments of the template that the run file sets."""

    @property
    def template(self) -> Any: ...
    @property
    def limits(self) -> Any: ...
    @property
    def kwargs(self) -> Mapping[str, Any]: ...
    def render(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None, prompt: bool = False, **kwargs: Any
    ) -> str: ...


class ConversationEncoder:
    """Encodes examples with a chat template and a tokenizer.

    stops: texts of the tokens that end a reply.
    turns: "all" replies of a conversation are trained, or its "last".
    counts: "control_tokens_as_text", the spellings of control tokens in the rows so far.

    Raise ConfigError if a stop token is not an added token of the tokenizer.
    """

    def __init__(
        self, renderer: ChatRenderer, tokenizer: Tokenizer, stops: Sequence[str], turns: str = ChatOptions.turns
    ) -> None:
        if turns not in TURNS:
            raise ConfigError(f"data.chat.turns={turns!r} must be one of {', '.join(TURNS)}")
        self._renderer, self._tokenizer, self._turns = renderer, tokenizer, turns
        text = renderer.template.text + (renderer.template.tool_text or "")
        self._controls = ControlTokens(tokenizer, text, stops)
        for stop in stops:
            if tokenizer.backend.token_to_id(stop) not in self._controls.stop_ids:
                raise ConfigError(
                    f"{tokenizer.folder}: the stop token {stop!r} is not among the added tokens of tokenizer.json; "
                    "set data.chat.stop_tokens to the tokens that end a reply"
                )
        self._tokens = SampleTokens(tokenizer, self._controls)
        modes = ({MODE: False}, {MODE: True}) if MODE in text and MODE not in renderer.kwargs else ()
        self._markup = Markup(self._controls.stops, self._controls.special, self._controls.added, modes)
        self._eos, self._bos = tokenizer.backend.id_to_token(tokenizer.eos_id), tokenizer.bos_id
        self._begins_with_bos = tokenizer.backend.encode("kumi").ids[:1] == [tokenizer.bos_id]
        self.counts: Counter[str] = Counter()

    def encode(self, example: Example) -> list[EncodedUnit]:
        """Return the units of an example: one for each sample of a conversation, one with both sides of a preference.

        Raise RowRefused if it cannot be trained on as it would be generated.
        """
        self._tokens.clear()
        self._renderer.limits.start()
        try:
            return self._units(example)
        finally:
            self._renderer.limits.end()

    def whole(self, side: Conversation) -> MaskedSequence:
        """Return the tokens of a whole conversation as the template renders it, as apply_chat_template of transformers.

        Spellings of control tokens in messages stay text. Raise RowRefused as `encode` does.
        """
        self._tokens.clear()
        self._renderer.limits.start()
        try:
            rendered = self._render_marked(side)
            text = rendered.render(rendered.messages, False, {})
            return self._tokens.encode(Sample(text, len(rendered.messages), ()), rendered.messages, rendered.mark)
        finally:
            self._renderer.limits.end()

    def samples(self, side: Conversation) -> list[tuple[Sample, list[MessageText]]]:
        """Return the samples of a conversation without tokens, each with the places of its messages.

        Raise RowRefused as `encode` does.
        """
        self._renderer.limits.start()
        try:
            return [self._located(rendered) for rendered in self._samples(side)]
        finally:
            self._renderer.limits.end()

    def _located(self, rendered: _Rendered) -> tuple[Sample, list[MessageText]]:
        places = self._short_places(rendered)
        return rendered.sample, message_texts(rendered.sample, rendered.messages, self._controls.added, places)

    def _units(self, example: Example) -> list[EncodedUnit]:
        """Return what `encode` returns; the limits of the renderer have been started."""
        kind, sides = example.kind, example.sides
        if kind == "preference":
            return [EncodedUnit(self._pair(*sides), margin=example.margin)]
        [side] = sides
        if isinstance(side, PlainText):
            sequences = [self._plain(side, prompt=kind == "prompt")]
        elif kind == "prompt":
            sequences = [self._prompt(side)]
        else:
            sequences = [self._sequence(sample, side) for sample in self._samples(side)]
        extra = dict(example.extra) | (_prompt_columns(side) if kind == "prompt" else {})
        return [EncodedUnit((sequence,), example.label, extra=extra) for sequence in sequences]

    def _samples(self, side: Conversation) -> list[_Rendered]:
        """Return the samples of a conversation. Raise RowRefused as `split_samples` does."""
        trained = _trained(side)
        rendered = self._render_marked(side)
        if rendered.mark:
            self._check_stops(side, trained)
        modes = () if MODE in side.template_kwargs else self._markup.modes
        markup = self._markup._replace(modes=modes)
        trained = trained[-1:] if self._turns == "last" else trained
        try:
            samples = split_samples(rendered.render, rendered.messages, trained, markup)
        except RowRefused as refused:
            # Some templates, such as DeepSeek-V3's, concatenate the arguments of a call, and need them as text.
            if refused.kind != ERROR or "TypeError" not in refused.reason:
                raise
            rendered = rendered._replace(messages=[_with_text_arguments(message) for message in rendered.messages])
            try:
                samples = split_samples(rendered.render, rendered.messages, trained, markup)
            except RowRefused as again:
                raise (refused if again.kind == ERROR else again) from None
        for tool in rendered.tools or ():
            _check_tool(tool, samples[0].text)
        return [rendered._replace(sample=sample) for sample in samples]

    def _render_marked(self, side: Conversation) -> _Rendered:
        """Return the conversation with marks in the control tokens that it spells, without a sample yet."""
        messages, tools, mark, count = self._controls.marked(side.messages, side.tools)
        self.counts["control_tokens_as_text"] += count

        def render(part: Sequence[Message], prompt: bool, mode: Mapping[str, Any]) -> str:
            return self._renderer.render(part, tools, prompt, **{**side.template_kwargs, **mode})

        return _Rendered(render, messages, tools, mark, _NOTHING)

    def _check_stops(self, side: Conversation, trained: Sequence[int]) -> None:
        """Raise RowRefused if one of the messages `trained` spells a stop token."""
        for i in trained:
            spelt = spells(side.messages[i], self._controls.stops)
            if spelt:
                raise RowRefused(
                    "stop-spelt", f"message {i + 1}: the reply spells the stop token {spelt}, at which inference ends"
                )

    def _sequence(self, rendered: _Rendered, side: Conversation) -> MaskedSequence:
        """Return the tokens of the sample of `rendered`, with the weights of the messages of `side`."""
        sequence = self._tokens.encode(rendered.sample, rendered.messages, rendered.mark, self._short_places(rendered))
        if all(side.weight[reply.message] == 1 for reply in rendered.sample.replies):
            return sequence
        weights = [
            side.weight[turn - 1] if mask & TRAINED else 1.0
            for mask, turn in zip(sequence.mask, sequence.turns, strict=True)
        ]
        return replace(sequence, weights=weights)

    def _prompt(self, side: Conversation) -> MaskedSequence:
        """Return the tokens of a prompt with the beginning of a reply, none of them trained."""
        _check_roles(side.messages)
        rendered = self._render_marked(side)
        text, count = rendered.render(rendered.messages, True, {}), len(rendered.messages)
        check_prompt(rendered.messages, count, text)
        for tool in rendered.tools or ():
            _check_tool(tool, text)
        rendered = rendered._replace(sample=Sample(text, count, ()))
        return self._tokens.encode(rendered.sample, rendered.messages, rendered.mark, self._short_places(rendered))

    def _short_places(self, rendered: _Rendered) -> Places:
        return short_places(rendered.render, rendered.sample, rendered.messages, self._controls.added)

    def _plain(self, side: PlainText, prompt: bool = False) -> MaskedSequence:
        """Return the tokens of a prompt, with BOS where the tokenizer adds it, and of its completion with eos."""
        messages: list[Message] = [{"role": "user", "content": side.prompt}]
        if not prompt:
            if not side.completion.strip():
                raise RowRefused("empty-completion", "the completion is empty; there is nothing to train in it")
            messages.append({"role": "assistant", "content": side.completion})
            if spells(side.completion, alternatives([self._eos])):
                raise RowRefused(
                    "stop-spelt", f"the completion spells {self._eos}, which is added at its end; leave it out"
                )
        marked, _, mark, count = self._controls.marked(messages, None)
        self.counts["control_tokens_as_text"] += count
        texts = [message["content"] for message in marked]
        replies: tuple[Reply, ...] = ()
        if not prompt:
            start, stop = len(texts[0]), len(texts[0]) + len(texts[1])
            texts.append(self._eos)
            replies = (Reply(1, start, stop, stop + len(self._eos)),)
        sequence = self._tokens.encode(Sample("".join(texts), len(marked), replies), marked, mark)
        if self._bos is None or not self._begins_with_bos:
            return sequence
        return MaskedSequence([self._bos, *sequence.ids], [0, *sequence.mask], [0, *sequence.turns])

    def _pair(
        self, chosen: Conversation | PlainText, rejected: Conversation | PlainText
    ) -> tuple[MaskedSequence, MaskedSequence]:
        """Return the two sides of a preference, each of one sample, after the same prompt."""
        if isinstance(chosen, PlainText) or isinstance(rejected, PlainText):
            assert isinstance(chosen, PlainText)
            assert isinstance(rejected, PlainText)
            first, second = self._plain(chosen), self._plain(rejected)
        else:
            left, right = _after_same_prompt(self._single(chosen, "chosen"), self._single(rejected, "rejected"))
            first, second = self._sequence(left, chosen), self._sequence(right, rejected)
        if first.ids == second.ids:
            raise RowRefused("sides-equal", "the chosen and the rejected side are the same; there is no preference")
        return first, second

    def _single(self, side: Conversation, name: str) -> _Rendered:
        """Return the only sample of the side `name` of a preference. Raise RowRefused if it has several."""
        samples = self._samples(side)
        if len(samples) > 1:
            raise RowRefused(
                "several-samples",
                f"the {name} side becomes {len(samples)} samples, because the template rewrites earlier replies, but a "
                "side must be one",
            )
        return samples[0]


class _Rendered(NamedTuple):
    """A conversation with marks in the control tokens that it spells, its rendering function, and a sample of it."""

    render: Render
    messages: Sequence[Message]
    tools: Sequence[Any] | None
    mark: str
    sample: Sample


# The sample of a conversation that is not split into samples yet.
_NOTHING = Sample("", 0, ())


def _after_same_prompt(left: _Rendered, right: _Rendered) -> tuple[_Rendered, _Rendered]:
    """Return both sides with the shorter of their prompts: a mode of inference (see `Markup.modes`) makes some longer.

    Raise RowRefused unless the longer prompt begins with the shorter one.
    """
    start = min(left.sample.replies[0].start, right.sample.replies[0].start)
    result = []
    for side in (left, right):
        first, *others = side.sample.replies
        sample = side.sample._replace(replies=(first._replace(start=start), *others))
        result.append(side._replace(sample=sample))
    prompts = [unmarked(side.sample.text[:start], side.mark) for side in result]
    if prompts[0] != prompts[1]:
        raise RowRefused("sides-differ", "the prompts of the chosen and of the rejected side differ")
    return result[0], result[1]


def _prompt_columns(side: Conversation | PlainText) -> dict[str, Any]:
    """Return the columns of a prompt's row, as messages or text, which other tokenizers and rewards may read."""
    if isinstance(side, PlainText):
        return {"prompt": side.prompt}
    return {"prompt": list(side.messages)} | ({} if side.tools is None else {"tools": side.tools})


def _trained(side: Conversation) -> list[int]:
    """Return the numbers, from 0, of the messages to train. Raise RowRefused for none, or if a reply comes first."""
    _check_roles(side.messages)
    trained = [i for i, (message, train) in enumerate(zip(side.messages, side.train, strict=True)) if train]
    trained = [i for i in trained if side.messages[i]["role"] == "assistant"]
    if not trained:
        raise RowRefused("no-reply", "no message of the assistant is to be trained")
    return trained


def _check_roles(messages: Sequence[Message]) -> None:
    """Raise RowRefused for a role that no template knows, or if the first message after the system's is a reply."""
    for i, message in enumerate(messages):
        if message["role"] not in ROLES[1:]:
            raise RowRefused(
                "unknown-role",
                f"message {i + 1}: role {excerpt(str(message['role']))} is none of {', '.join(ROLES[1:])}",
            )
    first = next((message["role"] for message in messages if message["role"] not in ("system", "developer")), None)
    if first == "assistant":
        raise RowRefused("assistant-first", "the conversation begins with the assistant, which has nothing to answer")


def _with_text_arguments(message: Message) -> Message:
    """Return `message` with the arguments of its tool calls as JSON text."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = dict(call.get("function", call))
        function["arguments"] = json.dumps(function.get("arguments"), ensure_ascii=False)
        calls.append({**call, "function": function} if "function" in call else function)
    return {**message, "tool_calls": calls}


def _check_tool(tool: Any, text: str) -> None:
    """Raise RowRefused unless `text` shows the tool's name."""
    function = tool.get("function", tool) if isinstance(tool, Mapping) else {}
    name = function.get("name") if isinstance(function, Mapping) else None
    if isinstance(name, str) and not contains(text, name):
        raise RowRefused("not-shown", f"the template does not show the tool {excerpt(name)}")
