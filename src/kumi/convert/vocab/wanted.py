"""Tokens that a user asks for by name: a file of them, checked against the tokenizer that gets them."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kumi.convert.vocab.base import Base
from kumi.errors import ConfigError
from kumi.files.untrusted import CONFIG, read_regular
from kumi.paths import looked_for

_LONGEST = 1000


@dataclass(frozen=True)
class Wanted:
    """A token to add as it is spelled; a special one is a mark, which decoding may leave out. `where` it was named."""

    text: str
    special: bool
    where: str


def read_wanted(file: str | Path, *, special: bool) -> list[Wanted]:
    """The tokens of a text file, one a line, just as they stand there."""
    path = Path(file)
    try:
        text = read_regular(path, CONFIG.size, follow=True).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: byte {error.start} is not UTF-8; save the file as UTF-8") from None
    except OSError as error:
        raise ConfigError(
            f"{looked_for(path)}: cannot be read ({error.strerror}); name a text file with one token a line"
        ) from None
    except ValueError as error:
        raise ConfigError(f"{path}: {error}; name a text file with one token a line") from None
    lines = text.removeprefix("﻿").split("\n")
    if lines[-1] == "":  # the end of the last line
        lines.pop()
    found = [Wanted(line.removesuffix("\r"), special, f"{path}:{n}") for n, line in enumerate(lines, 1)]
    if not found:
        raise ConfigError(f"{path}: holds no tokens; write one a line")
    return found


def check_wanted(tokens: Sequence[Wanted], base: Base) -> None:
    """Nothing, when each of `tokens` can become one new token; ConfigError naming the first that cannot."""
    seen: dict[str, str] = {}
    for token in tokens:
        _check_spelling(token)
        if token.text in seen:
            raise ConfigError(f"{token.where}: {token.text!r} stands already at {seen[token.text]}; name a token once")
        seen[token.text] = token.where
        known = base.vocab.get(token.text)
        if known is None:
            ids = base.pieces(token.text)
            same = len(ids) == 1 and base.backend.decode(list(ids), skip_special_tokens=False) == token.text
            known = ids[0] if same else None
        if known is not None:
            raise ConfigError(f"{token.where}: {token.text!r} is token {known} of {base.folder} already; leave it out")


def _check_spelling(token: Wanted) -> None:
    if not token.text.strip():
        raise ConfigError(f"{token.where}: {token.text!r} is empty or blank; every line names a token")
    odd = next((letter for letter in token.text if unicodedata.category(letter) in ("Cc", "Cs", "Cn")), None)
    if odd is not None:
        raise ConfigError(
            f"{token.where}: {token.text!r} has the character U+{ord(odd):04X}, which is a control "
            f"character or none at all; take it out"
        )
    if len(token.text) > _LONGEST:
        raise ConfigError(f"{token.where}: a token of {len(token.text)} characters; one may have {_LONGEST}")
