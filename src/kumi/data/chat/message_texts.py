"""Where the text of each message is in a sample, the rendered beginning of a conversation."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

from kumi.data.chat.as_generated import Message, Sample, required_texts
from kumi.data.chat.masked import ROLE_SHIFT, TRAINED
from kumi.data.formats.example import ROLES

# Start and end of messages in a text, by the number of the message from 0.
Places: TypeAlias = Mapping[int, tuple[int, int]]
NOWHERE: Places = MappingProxyType({})
ASSISTANT = ROLES.index("assistant")


class MessageText(NamedTuple):
    """Characters `start` to `end` of a text: those of message `number`, from 1. mask: that of their tokens."""

    start: int
    end: int
    mask: int
    number: int


def message_texts(
    sample: Sample, messages: Sequence[Message], added: re.Pattern[str], places: Places = NOWHERE
) -> list[MessageText]:
    """Return where `sample` has the texts of its messages, in the order of the text; a trained reply is one segment.

    The texts of other messages are searched in their order, between the replies around them; what the template adds or
    rewrites is in no segment. places: where short messages are, which are not searched for.
    """
    replies = {reply.message: reply for reply in sample.replies}
    starts = [reply.start for reply in sample.replies]
    limits = iter([*starts, len(sample.text)])
    first, limit = 0, next(limits)
    position = 0
    segments = []
    for i, message in enumerate(messages[: sample.messages]):
        if i in replies:
            reply = replies[i]
            segments.append(MessageText(reply.start, reply.end, TRAINED | ASSISTANT << ROLE_SHIFT, i + 1))
            first = position = reply.end
            limit = next(limits)
            continue
        place = places.get(i)
        if place is None:
            parts = required_texts(message, added)
            # Some templates write the system message after others.
            place = _find(sample.text, parts, position, limit) or _find(sample.text, parts, first, limit)
        if place is not None:
            segments.append(MessageText(*place, ROLES.index(message["role"]) << ROLE_SHIFT, i + 1))
            position = place[1]
    return _apart(sorted(segments))


def _find(text: str, parts: Sequence[str], start: int, end: int) -> tuple[int, int] | None:
    """Return start and end of `parts`, one after another in `text[start:end]`; None if the text has none of them."""
    first, position = -1, start
    for part in parts:
        at = text.find(part, position, end)
        if at < 0:
            part = json.dumps(part, ensure_ascii=False)[1:-1]
            at = text.find(part, position, end)
        if at >= 0:
            first, position = at if first < 0 else first, at + len(part)
    return None if first < 0 else (first, position)


def _apart(segments: Sequence[MessageText]) -> list[MessageText]:
    """Return `segments` without those that overlap with the one before."""
    result: list[MessageText] = []
    for segment in segments:
        if not result or segment.start >= result[-1].end:
            result.append(segment)
    return result
