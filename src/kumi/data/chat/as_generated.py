"""Trained spans of a conversation, derived by rendering it as inference does, for any chat template.

A reply is trained after the prompt that inference would give the model, and ends with the token that ends it there. If
a template renders earlier messages in another way once more messages follow, a conversation becomes several samples.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from kumi.data.chat.masked import RowRefused
from kumi.data.chat.shown_values import Value, check_values, plain_values

Message = Mapping[str, Any]
# render(messages, prompt, arguments of the template) -> text; `prompt` adds the generation prompt.
Render = Callable[[Sequence[Message], bool, Mapping[str, Any]], str]

# Longest excerpt of a row in the sentence of a refusal.
_EXCERPT = 60


class Reply(NamedTuple):
    """Characters `start` to `end` of a sample's text: message number `message`, from 0; its stop token is at `stop`."""

    message: int
    start: int
    stop: int
    end: int


class Sample(NamedTuple):
    """A rendering of the first `messages` messages, and its trained replies in their order."""

    text: str
    messages: int
    replies: tuple[Reply, ...]


class Markup(NamedTuple):
    """Tokens of a template, as patterns that match nothing where there are none.

    stops: the tokens that end a reply.
    special: tokens that may follow a stop token at the end of a text.
    added: all tokens that a tokenizer matches before it splits text.
    modes: arguments, each a mapping, with which inference may render the generation prompt besides the default.
    """

    stops: re.Pattern[str]
    special: re.Pattern[str]
    added: re.Pattern[str]
    modes: Sequence[Mapping[str, Any]] = ()


def alternatives(tokens: Sequence[str]) -> re.Pattern[str]:
    """Return a pattern that matches each of `tokens`, the longest first, and nothing if there are none."""
    return re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or r"(?!)")


def split_samples(render: Render, messages: Sequence[Message], trained: Sequence[int], markup: Markup) -> list[Sample]:
    """Return samples in which each message of the assistant in `trained` is a reply of exactly one sample.

    trained: numbers of messages, from 0, ascending. Raise RowRefused for a reply that inference could not generate
    after its prompt, or that the template does not show.
    """
    done: list[Sample] = []
    text, count, replies = "", 0, list[Reply]()
    for i in trained:
        parts = required_texts(messages[i], markup.added)
        if not parts:
            raise RowRefused("empty-completion", f"message {i + 1} is an empty reply; there is nothing to train in it")
        whole = render(messages[: i + 1], False, {})
        start = _prompt_length(render, messages[:i], whole, parts, markup)
        whole, stop, end = _reply_end(render, messages, i, whole, start, parts, markup)
        _check_shown(parts, whole[start:end], i, "reply")
        check_values(_argument_values(messages[i]), whole[start:end], i, "reply")
        check_prompt(messages, i, whole[:start])
        # The reply continues the sample if its prompt begins with the text up to the last trained reply.
        if replies and not whole[:start].startswith(text[: replies[-1].end]):
            done.append(Sample(text, count, tuple(replies)))
            replies = []
        replies.append(Reply(i, start, stop, end))
        text, count = whole, i + 1
    return [*done, Sample(text, count, tuple(replies))] if replies else done


def required_texts(message: Message, added: re.Pattern[str]) -> list[str]:
    """Return the texts of `message` that a rendering must contain: thoughts, content, names and arguments of calls.

    Content is split at `added` tokens such as `</think>`, because templates move what they enclose.
    """
    parts: list[str] = []
    for key in ("reasoning_content", "content"):
        text = message.get(key)
        if isinstance(text, str) and text:
            parts += [text] if added.search(text) is None else added.split(text)
    for call in message.get("tool_calls") or ():
        function = call.get("function", call)
        parts += [str(function.get("name", "")), *_leaves(function.get("arguments"))]
    return [part for part in map(str.strip, parts) if part]


def _leaves(value: Any) -> Iterator[str]:
    """Yield the names and texts in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield str(key)
            yield from _leaves(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item)


def _argument_values(message: Message) -> Iterator[Value]:
    """Yield the numbers and truth values in the arguments of the message's tool calls."""
    for call in message.get("tool_calls") or ():
        yield from plain_values(call.get("function", call).get("arguments"))


def contains(text: str, part: str) -> bool:
    """Return whether `text` contains `part`, as it is or with the escapes of JSON or Python."""
    if part in text:
        return True
    escaped = json.dumps(part, ensure_ascii=False)[1:-1]
    return escaped in text or escaped.replace("\\", "") in text.replace("\\", "")


def _prompt_length(render: Render, before: Sequence[Message], whole: str, parts: Sequence[str], markup: Markup) -> int:
    """Return the length of the longest prompt of inference with which `whole` begins.

    `whole` is the text to the end of the reply. The longest prompt counts, because a part that some mode of inference
    supplies, such as an empty think block, is not generated.
    """
    prompt = render(before, True, {})
    length = len(prompt) if whole.startswith(prompt) else -1
    for mode in markup.modes:
        # If a text of the message begins right after this prompt, no mode has a longer one.
        if length >= 0 and any(part[0].isalnum() and whole.startswith(part, length) for part in parts):
            break
        other = render(before, True, mode)
        if len(other) > length and whole.startswith(other):
            length = len(other)
    if length < 0:
        where = _difference(prompt, whole)
        raise RowRefused(
            "not-after-prompt",
            f"message {len(before) + 1}: the template does not render the reply after the prompt of inference, which "
            f"goes on with {excerpt(prompt[where:])} where the conversation has {excerpt(whole[where:])}",
        )
    return length


def _difference(first: str, second: str) -> int:
    """Return the length of the longest common beginning."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if first[low:middle] == second[low:middle] else (low, middle - 1)
    return low


def _reply_end(
    render: Render, messages: Sequence[Message], i: int, whole: str, start: int, parts: Sequence[str], markup: Markup
) -> tuple[str, int, int]:
    """Return the text up to reply `i` with its stop token, and the positions of the token's start and end."""
    match = markup.stops.search(whole, start)
    if match is None:
        return _reply_end_by_next(render, messages, i, whole, start, parts, markup)
    rest = markup.special.sub("", whole[match.end() :]).strip()
    if rest:
        raise RowRefused(
            "stop-within-reply",
            f"message {i + 1}: the stop token {match[0]} is followed by {excerpt(rest)}, which inference would never "
            "generate",
        )
    return whole, match.start(), match.end()


def _reply_end_by_next(
    render: Render, messages: Sequence[Message], i: int, whole: str, start: int, parts: Sequence[str], markup: Markup
) -> tuple[str, int, int]:
    """Return what `_reply_end` returns, for templates in which the token that begins the next message ends a reply.

    Raise RowRefused if that token is not a stop token.
    """
    following = {"role": "tool" if messages[i].get("tool_calls") else "user", "content": "0"}
    longer = render([*messages[: i + 1], following], False, {})
    # The end of the reply, which the longer text has too, even if it omits thoughts.
    whole = whole.rstrip()
    tail = whole[max(start, *(whole.rfind(part) for part in parts)) :]
    at, after = longer.rfind(tail), ""
    while at >= 0:
        after = longer[at + len(tail) :]
        stop = markup.stops.match(after.lstrip())
        if stop is not None:
            whole += after[: len(after) - len(after.lstrip())]
            return whole + stop[0], len(whole), len(whole) + len(stop[0])
        at = longer.rfind(tail, 0, at + len(tail) - 1)
    raise RowRefused(
        "no-stop-token",
        f"message {i + 1}: no stop token ends the reply, after which the template has {excerpt(after)}; name the token "
        "that ends replies in data.chat.stop_tokens",
    )


def check_prompt(messages: Sequence[Message], i: int, prompt: str) -> None:
    """Raise RowRefused unless `prompt`, that of the first `i` messages, shows all messages since the last reply.

    It must also show a system message that comes first.
    """
    for j in range(i - 1, -1, -1):
        if messages[j]["role"] == "assistant":
            break
        _check_text(messages[j], j, prompt)
    else:
        return
    if j > 0 and messages[0]["role"] in ("system", "developer"):
        _check_text(messages[0], 0, prompt)


def _check_text(message: Message, j: int, prompt: str) -> None:
    """Raise RowRefused unless `prompt` shows the content of `message`, which is number `j`."""
    text = message.get("content")
    if not isinstance(text, str) or contains(prompt, text.strip()):
        return
    parts, values, name = [text.strip()], list[Value](), f"{message['role']}'s message"
    if message["role"] == "tool" and text.lstrip()[:1] in ("{", "["):
        # Some templates, such as Gemma 4's, write the values of a tool's JSON in another form.
        with suppress(ValueError, RecursionError):
            result = json.loads(text)
            parts, values = [part.strip() for part in _leaves(result)], list(plain_values(result))
    _check_shown(parts, prompt, j, name)
    check_values(values, prompt, j, name)


def _check_shown(parts: Sequence[str], text: str, i: int, name: str) -> None:
    for part in parts:
        if not contains(text, part):
            raise RowRefused("not-shown", f"message {i + 1}: the template does not show {excerpt(part)} of the {name}")


def excerpt(text: str) -> str:
    """Return the beginning of `text` in quotes, with control characters escaped."""
    return repr(text[:_EXCERPT] + ("..." if len(text) > _EXCERPT else ""))
