"""Tokens that a user names: read from a file, and checked against the tokenizer."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kumi.convert.vocab.base_tokenizer import Base
from kumi.errors import ConfigError
from kumi.files.untrusted import CONFIG, read_regular
from kumi.paths import shown_path

# Most characters of a token.
_LONGEST = 1000


@dataclass(frozen=True)
class NewToken:
    """A token to add.

    text      its spelling
    special   a control token, which decoding may skip
    where     the file and line that name it
    """

    text: str
    special: bool
    where: str


def read_tokens(file: str | Path, *, special: bool) -> list[NewToken]:
    """Read the tokens of a text file, one per line, unchanged; raise ConfigError if there are none."""
    path = Path(file)
    try:
        text = read_regular(path, CONFIG.size, follow=True).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: byte {error.start} is not UTF-8; save the file as UTF-8") from None
    except OSError as error:
        raise ConfigError(
            f"{shown_path(path)}: cannot be read ({error.strerror}); name a text file with one token per line"
        ) from None
    except ValueError as error:
        raise ConfigError(f"{path}: {error}; name a text file with one token per line") from None
    lines = text.removeprefix("﻿").split("\n")
    if lines[-1] == "":  # after the last newline
        lines.pop()
    tokens = [NewToken(line.removesuffix("\r"), special, f"{path}:{n}") for n, line in enumerate(lines, 1)]
    if not tokens:
        raise ConfigError(f"{path}: holds no tokens; write one per line")
    return tokens


def check_tokens(tokens: Sequence[NewToken], base: Base) -> None:
    """Raise ConfigError, naming the token, unless each of `tokens` can become one new token."""
    seen: dict[str, str] = {}
    for token in tokens:
        _check_spelling(token)
        if token.text in seen:
            raise ConfigError(f"{token.where}: {token.text!r} is already named at {seen[token.text]}; name it once")
        seen[token.text] = token.where
        token_id = base.vocab.get(token.text)
        if token_id is None:
            ids = base.token_ids(token.text)
            is_token = len(ids) == 1 and base.backend.decode(list(ids), skip_special_tokens=False) == token.text
            token_id = ids[0] if is_token else None
        if token_id is not None:
            raise ConfigError(
                f"{token.where}: {token.text!r} is already token {token_id} of {base.folder}; leave it out"
            )


def _check_spelling(token: NewToken) -> None:
    """Raise ConfigError for a blank or overlong token, or one with control characters."""
    if not token.text.strip():
        raise ConfigError(f"{token.where}: {token.text!r} is empty or blank; remove the line")
    invalid = next((letter for letter in token.text if unicodedata.category(letter) in ("Cc", "Cs", "Cn")), None)
    if invalid is not None:
        raise ConfigError(
            f"{token.where}: {token.text!r} has the control or unassigned character U+{ord(invalid):04X}; remove it"
        )
    if len(token.text) > _LONGEST:
        raise ConfigError(
            f"{token.where}: the token has {len(token.text)} characters, and at most {_LONGEST} are allowed; shorten it"
        )
