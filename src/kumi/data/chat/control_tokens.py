"""Control tokens spelt in the data: they stay text, in trained and in other tokens.

Tokenizers match their added tokens anywhere, so a user who writes "<|im_end|>" would end a turn. A row with such a
spelling is rendered with a mark inside each spelling, a private-use character that the row does not have. The rendered
text is cut into parts with and without marks, and a copy of the tokenizer without added tokens encodes those with
marks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kumi.data.chat.as_generated import alternatives
from kumi.data.chat.masked import RowRefused
from kumi.data.tokenizer import Tokenizer

# Characters that stand for nothing, to mark places in a text that does not have them.
PRIVATE = range(0xE000, 0xF900)


class ControlTokens:
    """The control tokens of a tokenizer with a template.

    added: pattern of all added tokens, which a tokenizer matches before it splits text.
    stops: pattern of the stop tokens.
    special: pattern of the special tokens and the stop tokens, which no text of a row may become.
    cuts: pattern of the added tokens before which a text can be cut without changing its tokens, with the white space
        that they take along.
    special_ids, stop_ids: ids of the special tokens and of the stop tokens.
    safe: texts of the added tokens that are matched in any surroundings.
    """

    def __init__(self, tokenizer: Tokenizer, template: str, stops: Sequence[str]) -> None:
        tokens = tokenizer.backend.get_added_tokens_decoder()
        # A token of a single character cannot be marked inside; one in a text is refused once it is encoded.
        texts = {token.content: token for token in tokens.values() if len(token.content) > 1}
        special = {text for text, token in texts.items() if token.special} | set(stops)
        special.add(tokenizer.backend.id_to_token(tokenizer.eos_id))
        # Of the other added tokens, those that the template writes, such as <think>: a person's text must not become
        # one. The rest are pieces of text, such as Gemma's runs of spaces and HTML tags; inference makes them of text.
        written = {text for text in texts if text in template and not text.isspace()}
        self.added = alternatives([text for text in texts if not text.isspace()])
        self.special = alternatives([text for text in special if len(text) > 1])
        ids = {token.content: token_id for token_id, token in tokens.items()}
        self.stops = alternatives(stops)
        self.special_ids = frozenset(token_id for text, token_id in ids.items() if text in special)
        self.stop_ids = frozenset(ids[stop] for stop in stops if stop in ids)
        # What is marked in tools, and in messages of others than the assistant.
        self._foreign = alternatives([text for text in special | written if len(text) > 1])
        safe = [token for token in texts.values() if not token.normalized and not token.single_word]
        left = [token.content for token in safe if token.lstrip]
        plain = [token.content for token in safe if not token.lstrip]
        self.cuts = alternatives(plain)
        if left:
            self.cuts = re.compile(f"{self.cuts.pattern}|\\s*(?:{alternatives(left).pattern})")
        self.safe = frozenset(token.content for token in safe)
        self._last = re.compile(f"(?:{alternatives([*self.safe]).pattern})\\s*$")

    def ends_with_token(self, text: str) -> bool:
        """Return whether `text` ends with an added token, apart from white space that the token may take along."""
        return self._last.search(text, max(0, len(text) - 256)) is not None

    def marked(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None
    ) -> tuple[Sequence[Mapping[str, Any]], Sequence[Any] | None, str, int]:
        """Return messages and tools with a mark inside each control token that they spell.

        The third result is the mark, or "" if nothing is spelt; the fourth the number of spellings. In messages of the
        assistant, added tokens that are not special, such as <think>, get no mark: the model writes such tokens.
        """
        patterns = [self.special if message["role"] == "assistant" else self._foreign for message in messages]
        if not (tools and spells(tools, self._foreign)) and not any(map(spells, messages, patterns)):
            return messages, tools, "", 0
        everything = json.dumps([messages, tools], ensure_ascii=False, default=str)
        mark = next(
            (mark for mark in map(chr, PRIVATE) if mark not in everything and escaped(mark) not in everything), None
        )
        if mark is None:
            raise RowRefused("control-token", "the row spells control tokens, and has every private-use character")
        count = 0

        def edited(pattern: re.Pattern[str]) -> Callable[[str], str]:
            def edit(text: str) -> str:
                nonlocal count
                # Again, because one token may contain another.
                while matches := len(pattern.findall(text)):
                    text = pattern.sub(lambda match: match[0][0] + mark + match[0][1:], text)
                    count += matches
                return text

            return edit

        changed = [_mapped(message, edited(pattern)) for message, pattern in zip(messages, patterns, strict=True)]
        return changed, _mapped(tools, edited(self._foreign)), mark, count


def unmarked(text: str, mark: str) -> str:
    """Return `text` without `mark`, and without its escape in JSON."""
    return text.replace(mark, "").replace(escaped(mark), "") if mark else text


def escaped(mark: str) -> str:
    """Return `mark` as JSON in ASCII writes it."""
    return json.dumps(mark)[1:-1]


def without_added_tokens(backend: Any) -> Any:
    """Return a copy of the `tokenizers.Tokenizer` without its added tokens, which encodes their spellings as text."""
    from tokenizers import Tokenizer as Backend

    content = json.loads(backend.to_str())
    content.update(added_tokens=[], post_processor=None, truncation=None, padding=None)
    return Backend.from_str(json.dumps(content))


def spells(value: Any, pattern: re.Pattern[str]) -> str:
    """Return the first match of `pattern` in a text or a name of a JSON value, or ""."""
    if isinstance(value, str):
        match = pattern.search(value)
        return match[0] if match else ""
    if isinstance(value, Mapping):
        return next((token for pair in value.items() for item in pair if (token := spells(item, pattern))), "")
    if isinstance(value, (list, tuple)):
        return next((token for item in value if (token := spells(item, pattern))), "")
    return ""


def _mapped(value: Any, edit: Callable[[str], str]) -> Any:
    """Return a JSON value with `edit` applied to all texts and names."""
    if isinstance(value, str):
        return edit(value)
    if isinstance(value, Mapping):
        return {_mapped(key, edit): _mapped(item, edit) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_mapped(item, edit) for item in value]
    return value
