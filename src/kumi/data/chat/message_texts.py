"""Where the text of each message is in a rendered sample."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

from kumi.data.chat.as_generated import Message, Sample, shown
from kumi.data.chat.masked import ROLE_SHIFT, TRAINED
from kumi.data.formats.example import ROLES

# First and last positions of messages in a text, by their number from 0.
Places: TypeAlias = Mapping[int, tuple[int, int]]
NOWHERE: Places = MappingProxyType({})
ASSISTANT = ROLES.index("assistant")


class MessageText(NamedTuple):
    """Characters `start` to `end` of a text, from message `number`, from 1; `mask` is that of their tokens."""

    start: int
    end: int
    mask: int
    number: int


def message_texts(
    sample: Sample, messages: Sequence[Message], added: re.Pattern[str], places: Places = NOWHERE
) -> list[MessageText]:
    """Return where `sample` has the texts of its messages, in the order of the text; a trained reply is one segment.

    Other messages are searched in their order between the replies around them, without what the template adds or
    rewrites. places: of messages that are not searched.
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
            parts = shown(message, added)
            # Some templates write the system message after others.
            place = _find(sample.text, parts, position, limit) or _find(sample.text, parts, first, limit)
        if place is not None:
            segments.append(MessageText(*place, ROLES.index(message["role"]) << ROLE_SHIFT, i + 1))
            position = place[1]
    return _apart(sorted(segments))


def _find(text: str, parts: Sequence[str], start: int, end: int) -> tuple[int, int] | None:
    """Return the first and last position of `parts`, one after another in `text[start:end]`; None without any."""
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
