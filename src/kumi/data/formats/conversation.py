"""Build a Conversation from messages, and refuse one that has nothing to train."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kumi.data.chat.masked import RowRefused
from kumi.data.formats.example import Conversation
from kumi.data.formats.messages import Messages, convert_messages, read_template_kwargs, read_tools, text_message
from kumi.data.formats.plain_values import type_name


def build_conversation(messages: Messages, values: Mapping[str, Any]) -> Conversation:
    """Return the messages with the row's tools and arguments of the template."""
    tools = read_tools(values["tools"]) if "tools" in values else None
    kwargs = read_template_kwargs(values["chat_template_kwargs"]) if "chat_template_kwargs" in values else {}
    return Conversation(tuple(messages.messages), tuple(messages.train), tuple(messages.weight), tools, kwargs)


def check_replies(messages: Messages, start: int) -> None:
    """Raise RowRefused unless the messages from `start` on have a trained reply, and no trained reply is empty.

    A conversation must not begin with a reply, which would be trained without anything that it answers.
    """
    roles = [message["role"] for message in messages.messages]
    first = next((role for role in roles if role not in ("system", "developer")), None)
    if "assistant" not in roles[start:]:
        raise RowRefused("no-reply", "no message is a reply of the assistant")
    if first == "assistant":
        raise RowRefused("assistant-first", "the conversation begins with the assistant")
    if start and roles[start] != "assistant":
        raise RowRefused("no-reply", f"the completion begins with the role {roles[start]!r}, not with the assistant")
    if True not in messages.train:
        raise RowRefused("nothing-trained", "train is false, or weight is 0, for all replies of the assistant")
    for number, (message, train) in enumerate(zip(messages.messages, messages.train, strict=True)):
        if train and is_empty(message):
            raise RowRefused("empty-completion", f"the reply in message {number + 1} is empty")


def is_empty(message: Mapping[str, Any]) -> bool:
    """Return True for a reply without text, thoughts and tool calls."""
    content = message["content"]
    blank = not content or content.isspace()
    return blank and not message.get("tool_calls") and not message.get("reasoning_content", "").strip()


def untrained(messages: Messages, column: str) -> Messages:
    """Return the messages of a prompt, none of them trained. Raise RowRefused if one asks to be trained."""
    if True in messages.explicit:
        raise RowRefused("bad-train", f"{column}[{messages.explicit.index(True)}].train is true in a prompt")
    messages.train = [False] * len(messages.train)
    return messages


def join(first: Messages, second: Messages) -> Messages:
    """Return the messages of both."""
    return Messages(
        first.messages + second.messages,
        first.train + second.train,
        first.weight + second.weight,
        first.explicit + second.explicit,
    )


def add_system(messages: Messages, text: Any) -> Messages:
    """Return the messages after a system message with the text of the column `system`, unless that is empty."""
    message = text_message("system", text, "system")
    if not message["content"].strip():
        return messages
    own = next((other for other in messages.messages if other["role"] == "system"), None)
    if own == message:
        return messages
    if own is not None:
        raise RowRefused("two-systems", "the column system and a message of the role system differ; keep one of them")
    return join(Messages([message], [False], [1.0], [None]), messages)


def instruction_messages(values: Mapping[str, Any]) -> Messages:
    """Return the messages of an Alpaca row before its output; the last has the instruction, and the input below it."""
    parts = [text_message("user", values[name], name)["content"] for name in ("instruction", "input") if name in values]
    question = "\n".join(part for part in parts if part)
    if not question.strip():
        raise RowRefused("empty-prompt", "instruction is empty")
    messages: list[dict[str, Any]] = []
    history = values.get("history", [])
    if not isinstance(history, list):
        raise RowRefused("not-messages", f"history is {type_name(history)}, not a list of questions with their replies")
    for number, turn in enumerate(history):
        if not isinstance(turn, list) or len(turn) != 2 or not all(isinstance(text, str) for text in turn):
            raise RowRefused("not-messages", f"history[{number}] is not a list of a question and its reply, both text")
        messages += [{"role": "user", "content": turn[0]}, {"role": "assistant", "content": turn[1]}]
    converted = convert_messages([*messages, {"role": "user", "content": question}], "history")
    return add_system(converted, values["system"]) if "system" in values else converted
