"""Convert a row to an Example: one function for each kind of rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kumi.data.chat.masked import RowRefused
from kumi.data.formats.columns import CHAT, COLUMNS, LABELS, Format, kind_of, missing_columns, rename
from kumi.data.formats.conversation import (
    add_system,
    build_conversation,
    check_replies,
    instruction_messages,
    join,
    untrained,
)
from kumi.data.formats.example import Conversation, Example, PlainText
from kumi.data.formats.messages import Messages, convert_messages, read_margin
from kumi.data.formats.plain_values import brief_value, check_plain, check_text, type_name
from kumi.data.formats.preference import preference_sides

Values = Mapping[str, Any]


def to_example(format: Format, row: Values, file: str, line: int) -> Example:
    """Return the row of a file as an Example. Raise RowRefused if it is of another kind than `format`, or unusable."""
    values = {name: value for name, value in row.items() if value is not None}
    if format.columns:
        values = {new: values[name] for name, new in rename(format.columns, values).items()}
    _check_kind(format, values)
    return _KINDS[format.kind](values, file, line)


def _check_kind(format: Format, values: Values) -> None:
    """Raise RowRefused unless the row has the columns of its source's kind."""
    kind = format.kind
    if format.forced:
        lacking = missing_columns(kind, values)
    else:
        actual = kind_of(values)
        if actual == kind:
            return
        lacking = missing_columns(kind, values)
        if actual is not None and not lacking:
            raise RowRefused(
                "other-kind",
                f"the row's columns ({_names(values)}) are those of {actual!r}, and its source is {kind!r}; put "
                "such rows into a source of their own, or set kind",
            )
    if lacking:
        raise RowRefused("other-kind", f"a row of {kind!r} needs {lacking}; this one has {_names(values)}")


def _names(values: Values) -> str:
    return ", ".join(name if name.isprintable() else repr(name) for name in list(values)[:8]) or "no column"


def _chat(values: Values, file: str, line: int) -> Example:
    messages = _chat_messages(values)
    check_replies(messages, 0)
    return Example("chat", (build_conversation(messages, values),), file, line)


def _chat_messages(values: Values) -> Messages:
    column = next(name for name in CHAT if name in values)
    messages = convert_messages(values[column], column)
    return add_system(messages, values["system"]) if "system" in values else messages


def _prompt_completion(values: Values, file: str, line: int) -> Example:
    return Example("prompt-completion", (_completion_side(values),), file, line)


def _completion_side(values: Values) -> Conversation | PlainText:
    """Return the prompt and completion of a row: both text, or both messages."""
    prompt, completion = values["prompt"], values["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        if not completion or completion.isspace():
            raise RowRefused("empty-completion", "completion is empty")
        return PlainText(check_text(prompt, "prompt"), check_text(completion, "completion"))
    if isinstance(prompt, str) or isinstance(completion, str):
        raise RowRefused(
            "mixed-types",
            f"prompt is {type_name(prompt)} and completion is {type_name(completion)}; both must be text, or both "
            "messages",
        )
    before = untrained(convert_messages(prompt, "prompt"), "prompt")
    messages = join(before, convert_messages(completion, "completion"))
    check_replies(messages, len(before.messages))
    return build_conversation(messages, values)


def _instruction(values: Values, file: str, line: int) -> Example:
    return Example("instruction", (_instruction_side(values),), file, line)


def _instruction_side(values: Values) -> Conversation:
    """Return the messages of an Alpaca row, with its output as the reply."""
    messages = instruction_messages(values)
    messages = join(messages, convert_messages({"role": "assistant", "content": values["output"]}, "output"))
    check_replies(messages, 0)
    return build_conversation(messages, values)


def _preference(values: Values, file: str, line: int) -> Example:
    sides = preference_sides(values)
    return Example("preference", sides, file, line, margin=read_margin(values.get("margin")))


def _feedback(values: Values, file: str, line: int) -> Example:
    """Return a reply with its label: a completion, the output for an instruction, or the last of the messages."""
    name = next(name for name in LABELS if name in values)
    label = values[name]
    if not isinstance(label, bool):
        raise RowRefused("bad-label", f"{name} is {brief_value(label)}, not true or false")
    if "prompt" in values and "completion" in values:
        side = _completion_side(values)
    elif "instruction" in values and "output" in values:
        side = _last_reply(instruction_messages(values), values)
    else:
        messages = _chat_messages(values)
        side = _last_reply(messages, values)
    return Example("feedback", (side,), file, line, label=label)


def _last_reply(messages: Messages, values: Values) -> Conversation:
    """Return the conversation, with the row's output if it has one; only the last message, which the label judges, is
    trained.
    """
    if "instruction" in values and "output" in values:
        messages = join(messages, convert_messages({"role": "assistant", "content": values["output"]}, "output"))
    count = len(messages.messages) - 1
    if count < 0 or messages.messages[-1]["role"] != "assistant":
        raise RowRefused("no-reply", "the conversation ends without a reply of the assistant, which the label judges")
    messages.train[:count] = [False] * count
    check_replies(messages, count)
    return build_conversation(messages, values)


def _prompt(values: Values, file: str, line: int) -> Example:
    """Return a prompt without a reply, as text or messages, with all other columns of the row."""
    raw = values["prompt"]
    extra = {name: value for name, value in values.items() if name not in COLUMNS["prompt"]}
    check_plain(extra, "the other columns")
    side: Conversation | PlainText
    if isinstance(raw, str):
        if not raw or raw.isspace():
            raise RowRefused("empty-prompt", "prompt is empty")
        side = PlainText(check_text(raw, "prompt"), "")
    else:
        messages = untrained(convert_messages(raw, "prompt"), "prompt")
        if not messages.messages:
            raise RowRefused("empty-prompt", "prompt has no message")
        if messages.messages[-1]["role"] not in ("user", "tool"):
            raise RowRefused("no-question", "prompt does not end with a message of the user or of a tool")
        side = build_conversation(messages, values)
    return Example("prompt", (side,), file, line, extra=extra)


_KINDS: dict[str, Callable[[Values, str, int], Example]] = {
    "chat": _chat,
    "prompt-completion": _prompt_completion,
    "instruction": _instruction,
    "preference": _preference,
    "feedback": _feedback,
    "prompt": _prompt,
}
