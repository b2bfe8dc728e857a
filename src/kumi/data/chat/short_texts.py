"""Where the very short texts of messages are in a rendered sample: a search may find them in the template's own text.

"user" is also the name of a role, and "a" is in many a header. So the sample is rendered again with a mark in place of
each short text. Where both renderings agree up to a mark, the text that it stands for is there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from kumi.data.chat.as_generated import Message, Render, Sample, required_texts
from kumi.data.chat.control_tokens import PRIVATE
from kumi.data.chat.limits import ERROR
from kumi.data.chat.masked import RowRefused

# The most characters of a short text. Longer texts are not parts of headers.
_SHORT = 16


def short_places(
    render: Render, sample: Sample, messages: Sequence[Message], added: re.Pattern[str]
) -> dict[int, tuple[int, int]]:
    """Return start and end of short contents in the text of `sample`, by the number of their message from 0.

    A content is absent if the template does not write it as it is, or if it is not all of its message. Raise RowRefused
    if the second rendering exceeds a limit.
    """
    replies = {reply.message for reply in sample.replies}
    texts = {
        i: message["content"]
        for i, message in enumerate(messages[: sample.messages])
        if i not in replies and _is_short(message, added)
    }
    mark = next((mark for mark in map(chr, PRIVATE) if mark not in sample.text), None)
    if not texts or mark is None:
        return {}
    changed = [
        {**message, "content": f"{mark}{i}{mark}"} if i in texts else message
        for i, message in enumerate(messages[: sample.messages])
    ]
    try:
        marked = render(changed, False, {})
    except RowRefused as refused:
        if refused.kind != ERROR:
            raise  # a limit
        return {}
    return _places(sample.text, re.split(f"{mark}(\\d+){mark}", marked), texts)


def _is_short(message: Message, added: re.Pattern[str]) -> bool:
    content = message.get("content")
    return isinstance(content, str) and len(content) <= _SHORT and required_texts(message, added) == [content.strip()]


def _places(text: str, parts: Sequence[str], texts: Mapping[int, str]) -> dict[int, tuple[int, int]]:
    """Return where `text` has `texts`; `parts` are text of the template and numbers of `texts`, in turn."""
    places: dict[int, tuple[int, int]] = {}
    position = 0
    for literal, number in zip(parts[::2], parts[1::2], strict=False):
        if not text.startswith(literal, position):
            break
        position += len(literal)
        content = texts[int(number)]
        if not text.startswith(content, position):
            content = content.strip()  # as most templates write it
            if not text.startswith(content, position):
                break
        start = position + len(content) - len(content.lstrip())
        places.setdefault(int(number), (start, start + len(content.strip())))
        position += len(content)
    return places
