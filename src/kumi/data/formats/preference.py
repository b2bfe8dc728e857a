"""Preference pairs: a prompt with a chosen and a rejected reply."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kumi.data.chat.masked import RowRefused
from kumi.data.formats.conversation import build_conversation, check_replies, instruction_messages, join, untrained
from kumi.data.formats.example import Conversation, PlainText
from kumi.data.formats.messages import Messages, convert_messages
from kumi.data.formats.plain_values import check_text, type_name

Sides = tuple[Conversation | PlainText, Conversation | PlainText]


def preference_sides(values: Mapping[str, Any]) -> Sides:
    """Return (chosen, rejected), each with the prompt, which is not trained.

    The prompt is that of the row; without one, the longest common prefix of messages. Raise RowRefused unless
    the row has a prompt and two different replies, both text or both messages.
    """
    chosen, rejected = values["chosen"], values["rejected"]
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise RowRefused(
            "mixed-types",
            f"chosen is {type_name(chosen)} and rejected is {type_name(rejected)}; both must be text, or both messages",
        )
    if isinstance(chosen, str):
        return _text_sides(values)
    first, second = convert_messages(chosen, "chosen"), convert_messages(rejected, "rejected")
    prompt = _prompt(values)
    # Some files repeat the prompt at the beginning of both replies.
    count = _prompt_length(first, second) if prompt is None else _repeated_length(prompt, first, second)
    if prompt is None:
        prompt = untrained(_cut(first, 0, count), "chosen")
    sides = [_cut(first, count), _cut(second, count)]
    _refuse_equal(sides[0].messages, sides[1].messages)
    for name, side in zip(("chosen", "rejected"), sides, strict=True):
        if not side.messages:
            raise RowRefused("empty-completion", f"{name} has no reply after the prompt")
        if side.messages[0]["role"] != "assistant":
            raise RowRefused(
                "prompts-differ",
                f"after the common prompt, {name} goes on with the role {side.messages[0]['role']!r}, not with "
                "the assistant",
            )
    whole = [join(prompt, side) for side in sides]
    for side in whole:
        check_replies(side, len(prompt.messages))
    return build_conversation(whole[0], values), build_conversation(whole[1], values)


def _text_sides(values: Mapping[str, Any]) -> Sides:
    """Return the sides of a row whose replies are text."""
    texts = {name: check_text(values[name], name) for name in ("chosen", "rejected")}
    for name, text in texts.items():
        if not text or text.isspace():
            raise RowRefused("empty-completion", f"{name} is empty")
    _refuse_equal(texts["chosen"], texts["rejected"])
    prompt = values.get("prompt")
    if isinstance(prompt, str):
        text = check_text(prompt, "prompt")
        return PlainText(text, texts["chosen"]), PlainText(text, texts["rejected"])
    if prompt is not None:
        raise RowRefused(
            "mixed-types",
            f"prompt is {type_name(prompt)}, but chosen and rejected are text; all must be text or messages",
        )
    if "instruction" not in values and "conversations" not in values:
        raise RowRefused("no-prompt", "chosen and rejected are text, and the row has no prompt that they answer")
    before = _prompt(values)
    assert before is not None
    sides = [
        join(before, convert_messages({"role": "assistant", "content": text}, name)) for name, text in texts.items()
    ]
    for side in sides:
        check_replies(side, len(before.messages))
    return build_conversation(sides[0], values), build_conversation(sides[1], values)


def _prompt(values: Mapping[str, Any]) -> Messages | None:
    """Return the prompt of a row with messages; None if chosen and rejected have it as their common prefix."""
    prompt = values.get("prompt")
    if isinstance(prompt, str):
        # As in UltraFeedback: the prompt is also the first message of both sides.
        return None
    if prompt is not None:
        return untrained(convert_messages(prompt, "prompt"), "prompt")
    if "conversations" in values:
        return untrained(convert_messages(values["conversations"], "conversations"), "conversations")
    return untrained(instruction_messages(values), "history") if "instruction" in values else None


def _prompt_length(first: Messages, second: Messages) -> int:
    """Return the number of messages with which both sides begin. Raise RowRefused if it is 0."""
    count = 0
    for one_side, other_side in zip(first.messages, second.messages, strict=False):
        if one_side != other_side:
            break
        count += 1
    if count == 0:
        raise RowRefused(
            "no-prompt", "chosen and rejected have no common first messages, and the row has no prompt as messages"
        )
    return count


def _repeated_length(prompt: Messages, first: Messages, second: Messages) -> int:
    """Return the number of messages of `prompt` if both sides repeat it, otherwise 0."""
    count = len(prompt.messages)
    both = all(side.messages[:count] == prompt.messages for side in (first, second))
    return count if both else 0


def _cut(messages: Messages, start: int, end: int | None = None) -> Messages:
    part = slice(start, end)
    return Messages(messages.messages[part], messages.train[part], messages.weight[part], messages.explicit[part])


def _refuse_equal(chosen: Any, rejected: Any) -> None:
    if chosen == rejected:
        raise RowRefused("sides-equal", "chosen and rejected are equal, so neither is better")
