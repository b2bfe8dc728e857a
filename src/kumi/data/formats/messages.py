"""Messages of all spellings as transformers' chat templates take them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kumi.data.chat.masked import RowRefused
from kumi.data.formats.example import ROLES
from kumi.data.formats.plain_values import brief_value, check_plain, check_text, parse_text, type_name

# Roles of ShareGPT's `from`; the others are those of `ROLES`.
ALIASES = {"human": "user", "gpt": "assistant", "function_call": "assistant", "observation": "tool"}
# Names of a reply's thoughts, as transformers reads them: the first that is set is taken.
REASONING = ("reasoning_content", "thinking", "reasoning")
# Keys of a message that are read.
MESSAGE_KEYS = frozenset(
    {"role", "from", "content", "value", "tool_calls", "tool_call_id", "name", "train", "weight", *REASONING}
)
_ROLES = {role: role for role in ROLES if role} | ALIASES
_LARGEST_FLOAT = 3.4e38  # of float32


@dataclass(slots=True)
class Messages:
    """Messages with flags, as in `kumi.data.formats.Conversation`; `explicit` is a message's own `train`, or None."""

    messages: list[dict[str, Any]]
    train: list[bool]
    weight: list[float]
    explicit: list[bool | None]


def convert_messages(value: Any, where: str) -> Messages:
    """Return the messages in the column `where`: a list of messages, or one. Raise RowRefused for another value."""
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, list):
        raise RowRefused("not-messages", f"{where} is {type_name(value)}, not a list of messages")
    result = Messages([], [], [], [])
    for number, raw in enumerate(value):
        if not isinstance(raw, dict):
            raise RowRefused("not-messages", f"{where}[{number}] is {type_name(raw)}, not a message")
        message = _message(raw, f"{where}[{number}]")
        is_reply = message["role"] == "assistant"
        explicit = raw.get("train")
        if explicit is not None and not isinstance(explicit, bool):
            raise RowRefused("bad-train", f"{where}[{number}].train is {brief_value(explicit)}, not true or false")
        if explicit and not is_reply:
            raise RowRefused(
                "bad-train",
                f"{where}[{number}].train is true for the role {message['role']!r}; only replies of the assistant are "
                "trained",
            )
        weight = _weight(raw.get("weight"), f"{where}[{number}].weight")
        result.messages.append(message)
        result.explicit.append(explicit)
        result.train.append(is_reply and explicit is not False and weight > 0)
        result.weight.append(weight)
    return result


def text_message(role: str, text: Any, where: str) -> dict[str, Any]:
    """Return a message with the text of the column `where`. Raise RowRefused unless it is text."""
    if not isinstance(text, str):
        raise RowRefused("not-text", f"{where} is {type_name(text)}, not text")
    return {"role": role, "content": check_text(text, where)}


def _message(raw: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the message `raw` with the keys of `kumi.data.formats.Conversation`; keys that are null are absent."""
    name = raw.get("role")
    if name is None:
        name = raw.get("from")
    role = _ROLES.get(name) if isinstance(name, str) else None
    if role is None:
        raise RowRefused(
            "unknown-role", f"{where} has the role {brief_value(name)}; it must be one of {', '.join(sorted(_ROLES))}"
        )
    content = raw.get("content")
    if content is None:
        content = raw.get("value")
    calls = raw.get("tool_calls")
    if name == "function_call" and calls is None:
        if not isinstance(content, str):
            raise RowRefused("broken-tool-call", f"{where} is a function_call with {type_name(content)}, not JSON text")
        calls, content = parse_text(content, where, "broken-tool-call"), None
        calls = calls if isinstance(calls, list) else [calls]
    message: dict[str, Any] = {"role": role, "content": _content(content, where)}
    for key in REASONING:
        thoughts = raw.get(key)
        if thoughts is not None:
            message["reasoning_content"] = text_message(role, thoughts, f"{where}.{key}")["content"]
            break
    if calls:
        message["tool_calls"] = _tool_calls(calls, f"{where}.tool_calls")
    elif calls is not None and not isinstance(calls, list):
        raise RowRefused("broken-tool-call", f"{where}.tool_calls is {type_name(calls)}, not a list")
    for key in ("tool_call_id", "name"):
        if raw.get(key) is not None:
            message[key] = text_message(role, raw[key], f"{where}.{key}")["content"]
    return message


def _content(content: Any, where: str) -> str:
    """Return the text of a message's content: text, null, or a list of parts with text."""
    if isinstance(content, str):
        return content if content.isascii() else check_text(content, where)
    if content is None:
        return ""
    if not isinstance(content, list):
        raise RowRefused("not-text", f"{where} has {type_name(content)} as content, not text")
    texts = []
    for part in content:
        kind = part.get("type", "text") if isinstance(part, dict) else None
        text = part.get("text") if isinstance(part, dict) else None
        if kind not in ("text", None) or not isinstance(text, str):
            name = brief_value(kind) if kind else type_name(part)
            raise RowRefused("not-text", f"{where} has content of the type {name}; only text is trained")
        texts.append(check_text(text, where))
    return "".join(texts)


def _weight(value: Any, where: str) -> float:
    """Return the weight of a message, by default 1. Raise RowRefused unless it is a finite number of at least 0."""
    if value is None:
        return 1.0
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    # The comparison is exact for whole numbers of any size, which a float cannot hold.
    if not is_number or not 0 <= value <= _LARGEST_FLOAT:
        raise RowRefused("bad-weight", f"{where} is {brief_value(value)}, not a finite number of at least 0")
    return float(value)


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise RowRefused("broken-tool-call", f"{where} is {type_name(calls)}, not a list")
    return [_tool_call(call, f"{where}[{number}]") for number, call in enumerate(calls)]


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    """Return the call in its own shape, {"function": {"name", "arguments"}} or flat, with its arguments parsed."""
    function = call.get("function", call) if isinstance(call, dict) else None
    function = call if function is None else function
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise RowRefused("broken-tool-call", f"{where} is no call of a function with a name: {brief_value(call)}")
    plain = {key: value for key, value in function.items() if value is not None}
    arguments = plain.get("arguments")
    if isinstance(arguments, str):
        plain["arguments"] = _arguments(arguments, f"{where}.arguments")
    if function is call:
        return dict(check_plain(plain, where))
    outer = {key: value for key, value in call.items() if value is not None}
    return dict(check_plain(outer | {"function": plain}, where))


def _arguments(text: str, where: str) -> Any:
    """Return the object in the JSON `text`, or `text` itself if it begins no object: a call may take text.

    Raise RowRefused for a broken object.
    """
    if not text.lstrip().startswith("{"):
        return text
    return parse_text(text, where, "broken-tool-call")


def read_tools(value: Any) -> list[Any] | None:
    """Return the tools of a row: a list of JSON schemas, or JSON text of one; None if there are none."""
    if isinstance(value, str):
        value = parse_text(value, "tools", "broken-tools") if value.strip() else None
    if value is None:
        return None
    if not isinstance(value, list):
        raise RowRefused("broken-tools", f"tools is {type_name(value)}, not a list of JSON schemas")
    tools = [parse_text(tool, "tools", "broken-tools") if isinstance(tool, str) else tool for tool in value]
    if not all(isinstance(tool, dict) for tool in tools):
        wrong = next(tool for tool in tools if not isinstance(tool, dict))
        raise RowRefused("broken-tools", f"tools has {type_name(wrong)} where a JSON schema was expected")
    return check_plain(tools, "tools") or None


# Arguments that the renderer itself gives to a template.
_OWN_ARGUMENTS = frozenset(
    {"messages", "conversation", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token"}
)


def read_template_kwargs(value: Any) -> Mapping[str, Any]:
    """Return a row's arguments of the template: an object, or JSON text of one. Raise RowRefused for reserved ones."""
    if isinstance(value, str):
        value = parse_text(value, "chat_template_kwargs", "bad-template-kwargs")
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise RowRefused("bad-template-kwargs", f"chat_template_kwargs is {type_name(value)}, not an object")
    own = _OWN_ARGUMENTS.intersection(value)
    if own:
        raise RowRefused(
            "bad-template-kwargs", f"chat_template_kwargs sets {min(own)!r}, which comes from the messages"
        )
    if value.get("chat_template") is not None:
        raise RowRefused(
            "bad-template-kwargs",
            "chat_template_kwargs sets 'chat_template', but a row may not bring its own template; leave it out, and "
            "name the run's template in data.chat.template",
        )
    return dict(check_plain({key: item for key, item in value.items() if item is not None}, "chat_template_kwargs"))


def read_margin(value: Any) -> float | None:
    """Return the margin of a preference; None if the row has none."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not _is_float32(value):
        raise RowRefused("bad-margin", f"margin is {brief_value(value)}, not a finite number")
    return float(value)


def _is_float32(value: float) -> bool:
    return (isinstance(value, int) or math.isfinite(value)) and abs(value) <= _LARGEST_FLOAT
