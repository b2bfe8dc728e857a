"""Safe output: a failing write never ends the program, no text steers a terminal or a page, and no secret is shown."""

from __future__ import annotations

import io
import os
import re
import sys
import unicodedata
from typing import Any

# Format characters that write Persian, Indic scripts and emoji: the zero-width non-joiner and joiner.
_JOINERS = "\u200c\u200d"
# Controls, format characters, surrogates, unassigned characters, separators of lines and paragraphs. Private-use
# characters stay: they only look different from font to font.
_ESCAPED = frozenset({"Cc", "Cf", "Cs", "Cn", "Zl", "Zp"})
# Emoji: each version of Unicode assigns new ones, which Python's older tables list as unassigned.
_EMOJI = range(0x1F000, 0x1FB00)
_FENCE = re.compile(r"`{3,}")
# Characters with a meaning in Markdown. An underscore within a word has none, nor an ampersand outside of an entity.
_MARKUP = re.compile(r"[\\`*\[\]|~$#]|(?<!\w)_|_(?!\w)|&(?=#?\w+;)")

_STREAMS = (("stdout", 1), ("stderr", 2))

# Values of environment variables whose names contain one of these are never shown, compared or sent.
_SECRET = re.compile("TOKEN|KEY|SECRET|PASSW|CREDENTIAL|AUTH", re.IGNORECASE)
# A value of such a variable with fewer characters is not hidden: it may be a word that other texts have, too.
_SHORTEST_SECRET = 8
_PASSWORD_IN_URL = re.compile(r"(://[^/\s:@]*:)[^/\s]+(?=@)")


def is_secret(variable: str) -> bool:
    """Return True if the value of this environment variable must not be shown."""
    return _SECRET.search(variable) is not None


def without_secrets(text: str) -> str:
    """Return `text`, such as the error of another library, without secrets of the environment and passwords of URLs."""
    secrets = [value for name, value in os.environ.items() if is_secret(name) and len(value) >= _SHORTEST_SECRET]
    for secret in sorted(secrets, key=len, reverse=True):  # one may contain another
        text = text.replace(secret, "(not shown)")
    return _PASSWORD_IN_URL.sub(r"\1(not shown)", text)


def visible(text: str) -> str:
    """Return `text`, which anyone may have written, for a terminal, a log or a page.

    Line breaks and tabs stay. All other characters that a terminal would obey instead of showing are escaped as in
    Python ("\\x1b"). So are characters that reorder text or have no width, except the joiners of scripts and emoji.
    """
    if text.isprintable():
        return text
    return "".join(char if char in "\n\t" or _shows(char) else ascii(char)[1:-1] for char in text)


def _shows(char: str) -> bool:
    return unicodedata.category(char) not in _ESCAPED or char in _JOINERS or ord(char) in _EMOJI


def fenced(text: str) -> str:
    """Return `text` as a code block of Markdown, which shows it as it is: nothing in it can end the block."""
    text = visible(text)
    longest = max((len(match[0]) for match in _FENCE.finditer(text)), default=2)
    fence = "`" * (longest + 1)
    return f"{fence}text\n{text}\n{fence}"


def inline_markdown(text: str) -> str:
    """Return `text` for a line or a table cell of Markdown, which shows it as it is, on one line.

    Punctuation with a meaning in Markdown, HTML or formulas is escaped, except an underscore within a word.
    """
    return _MARKUP.sub(r"\\\g<0>", visible(" ".join(text.split()))).replace("<", "&lt;").replace(">", "&gt;")


class _SafeStream(io.FileIO):
    """Raw stream that drops output which cannot be written, so that a run continues; its metrics are in a file.

    After the reader has closed the pipe, as in `kumi describe | head`, output is dropped silently. Any other write
    error (disk full, ...) also drops the output; for standard output, one warning goes to standard error.
    """

    warned = False

    def write(self, data: Any) -> int:
        """Write `data`, and return its length even if it had to be dropped."""
        try:
            return super().write(data) or 0
        except BrokenPipeError:
            return len(data)
        except OSError as error:
            if not self.warned and self.fileno() == 1:
                self.warned = True
                print(f"standard output cannot be written from here on: {error.strerror}", file=sys.stderr)
            return len(data)


def make_output_safe() -> None:
    """Replace sys.stdout and sys.stderr by streams that raise no error on a write.

    They survive a closed pipe, a closed descriptor, and characters outside the terminal's encoding.
    """
    for name, descriptor in _STREAMS:
        stream = getattr(sys, name)
        if stream is None:
            _open_descriptor(descriptor)
        setattr(sys, name, safe_stream(descriptor, getattr(stream, "encoding", "utf-8")))


def replace_missing_output() -> None:
    """Replace sys.stdout and sys.stderr by safe streams where the program has none, or has closed it."""
    for name, descriptor in _STREAMS:
        stream = getattr(sys, name)
        if stream is None or getattr(stream, "closed", False):
            _open_descriptor(descriptor)
            setattr(sys, name, safe_stream(descriptor, "utf-8"))


def _open_descriptor(descriptor: int) -> None:
    """Open /dev/null as `descriptor` if that is closed. Otherwise the next opened file would get the descriptor."""
    try:
        os.fstat(descriptor)
    except OSError:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, descriptor)
        if null != descriptor:
            os.close(null)
        os.set_inheritable(descriptor, True)


def safe_stream(descriptor: int, encoding: str) -> io.TextIOWrapper:
    """Return a text stream over `descriptor` that raises no error on a write, and does not close the descriptor."""
    raw = _SafeStream(descriptor, "w", closefd=False)
    return io.TextIOWrapper(
        io.BufferedWriter(raw), encoding, errors="backslashreplace", line_buffering=True, write_through=True
    )
