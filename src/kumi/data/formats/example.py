"""An example: one row of a source in the form that all formats are converted to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

RowKind = Literal["text", "chat", "prompt-completion", "instruction", "preference", "feedback", "prompt"]

# Roles of a message; the index of a role is its number in a store's mask file. "" is text of the template.
ROLES = ("", "system", "user", "assistant", "tool", "developer")


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages as transformers' chat templates take them.

    messages: dicts with "role" (one of `ROLES`), "content" (text) and, where the row has them, "reasoning_content",
        "tool_calls", "tool_call_id" and "name". Arguments of tool calls are objects where they parse as JSON.
    train: for each message, whether its tokens are trained; only messages of the assistant can be.
    weight: for each message, the weight of its tokens in the loss.
    tools: JSON schemas of the tools, or None.
    template_kwargs: arguments of the template that this row sets, such as enable_thinking.
    """

    messages: tuple[dict[str, Any], ...]
    train: tuple[bool, ...]
    weight: tuple[float, ...]
    tools: list[Any] | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PlainText:
    """A prompt and its completion as plain text, which no chat template renders; the completion is trained."""

    prompt: str
    completion: str


@dataclass(frozen=True, slots=True)
class Example:
    """One row of a source: a conversation or text, or two that are compared.

    sides: the one conversation or text; (chosen, rejected) for a preference. A "prompt" has only the prompt.
    file, line: the row's origin; lines count as in `kumi.data.records`.
    label: of a "feedback" row, whether its completion is desirable.
    margin: of a "preference" row, how much better the chosen side is, if the row says so.
    extra: other columns, which rewards may read; of "prompt" rows only.
    """

    kind: RowKind
    sides: tuple[Conversation | PlainText, ...]
    file: str
    line: int
    label: bool | None = None
    margin: float | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
