"""Texts without what tells who ran the validation, and where: names, paths, addresses, serial numbers, and values of
environment variables.

Everything that a report has from outside of kumi's own code goes through `shareable`, such as the text of an exception,
which may hold anything. The value of a variable may be a word that kumi's own texts have, too, such as "none". Such
a word stays: reports from every machine have it, and its removal would reveal the value.
"""

from __future__ import annotations

import ast
import getpass
import os
import platform
import pwd
import re
import socket
import sys
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cache, cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

REMOVED = "[removed]"
_LONGEST = 300
# Words that are removed wherever they occur, by what they look like. The first alternative that matches at a
# place counts.
_SHAPES = re.compile(
    r"""
    [a-z][\w+.-]*://\S*                                   # an address of a page or a store
    | \S*@\S*\.\S*                                        # an address of mail, a user at a host
    | (?:GPU-|MIG-)?[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}   # a UUID
    | [0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]     # a place on the PCI bus
    | (?:[0-9a-f]{2}:){5}[0-9a-f]{2}                      # an address of a network adapter
    | (?:[0-9a-f]{0,4}:){3,7}[0-9a-f]{0,4}                # an address of IPv6
    | \d{1,3}(?:\.\d{1,3}){3}(?::\d+)?                    # an address of IPv4
    | (?<![\w.])[0-9a-f]*\d[0-9a-f]{11,}(?![\w.])         # a serial number, a digest, a pointer
    | (?<![0-9a-z])0x[0-9a-f]+                            # a pointer; not the tile 320x128 in the name of a kernel
    """,
    re.VERBOSE | re.IGNORECASE,
)
# Anything with a slash or a backslash in it may be a path; units such as tokens/s are not.
_PATH = re.compile(r"""[^\s'"`()\[\]{}<>,;=]*[/\\][^\s'"`()\[\]{}<>,;]*""")
_UNIT = re.compile(r"[A-Za-z]+/s")
_VERSION = re.compile(r"\d+\.\d+(\.\d+)?")
# The least characters of a variable's value, and of a part of one, that are looked for.
_LEAST_VALUE, _LEAST_PART = 4, 8


class Private:
    """The strings of a process that no report may contain.

    `names`: of user and host, and folders. `environ`: the variables, whose values are private.
    """

    def __init__(self, environ: Mapping[str, str], names: Iterable[str]) -> None:
        self._environ, self._names = environ, tuple(names)

    @cached_property
    def pattern(self) -> re.Pattern[str] | None:
        """Matches each of the strings, as complete words, in any case; None if there are none."""
        words = {name for name in self._names if len(name) > 1}
        for value in self._environ.values():
            words.update(_words_of(value))
        if not words:
            return None
        longest_first = sorted(words, key=lambda word: (-len(word), word))
        return re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, longest_first))})(?!\w)", re.IGNORECASE)


def private_here(environ: Mapping[str, str]) -> Private:
    """Return the private strings of this process, which has the variables `environ`."""
    names = {platform.node(), socket.gethostname(), str(Path.home()), os.getcwd(), tempfile.gettempdir(), sys.prefix}
    with suppress(OSError, KeyError):  # a user without a name
        names.update((getpass.getuser(), pwd.getpwuid(os.getuid()).pw_name))
    names.update(part for name in tuple(names) if "/" not in name for part in name.split(".") if len(part) > 2)
    names.update((Path.home().name, environ.get("LOGNAME", ""), environ.get("USER", ""), environ.get("HOSTNAME", "")))
    return Private(environ, names)


def _words_of(value: str) -> set[str]:
    """Return the parts of a variable's value that are looked for: the whole, and each long part of a list.

    Plain numbers, versions and words of kumi's own texts are not private: a report has them by itself.
    """
    parts = {value.strip()} | {part for part in re.split(r"[\s:;,=]+", value) if len(part) >= _LEAST_PART}
    return {part for part in parts if len(part) >= _LEAST_VALUE and not _is_public(part)}


def _is_public(part: str) -> bool:
    return part.isdecimal() or _VERSION.fullmatch(part) is not None or part.lower() in own_words()


@cache
def own_words() -> frozenset[str]:
    """Return the words, in lower case, of the texts in the code of this package, from which reports are written."""
    words: set[str] = set()
    for file in Path(__file__).parent.glob("*.py"):
        tree = ast.parse(file.read_bytes())
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
                words.update(re.findall(r"[a-z]+", node.value.lower()))
    return frozenset(words)


def shareable(value: Any, private: Private) -> Any:
    """Return `value`, plain JSON data, with all private words of its texts removed."""
    if isinstance(value, str):
        return _shareable_text(value, private)
    if isinstance(value, Mapping):
        return {_shareable_text(str(key), private): shareable(each, private) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [shareable(each, private) for each in value]
    return value


def _shareable_text(text: str, private: Private) -> str:
    if private.pattern is not None:  # first: a path with spaces is one of these as a whole
        text = private.pattern.sub(REMOVED, text)
    text = _PATH.sub(lambda match: match[0] if _UNIT.fullmatch(match[0]) else REMOVED, text)
    text = _SHAPES.sub(REMOVED, text)
    text = re.sub(rf"(?:{re.escape(REMOVED)}[\s.:]*)+{re.escape(REMOVED)}", REMOVED, text)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."


_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+),? in (?P<name>[\w<>]+)')
_SOURCES = ("site-packages", "dist-packages", "src")
_PACKAGES = ("kumi", "torch", "triton", "torchao", "bitsandbytes", "flash_attn", "mamba_ssm")


def frames_in(text: str, most: int = 8) -> list[str]:
    """Return the places in a traceback, or in the stack that faulthandler prints, as "kumi.nn.rope:62 rotate".

    Only the `most` innermost ones are returned, in the order of the text. Places outside of
    `_PACKAGES` are left out, for their files may be named after anything.
    """
    places = [_place(match["file"], match["line"], match["name"]) for match in _FRAME.finditer(text)]
    inside = [place for place in places if place]
    innermost_first = "most recent call first" in text  # faulthandler's order
    return inside[:most] if innermost_first else inside[-most:]


def _place(file: str, line: str, name: str) -> str:
    parts = Path(file).with_suffix("").parts
    for index, (folder, package) in enumerate(pairwise(parts), 1):
        if package in _PACKAGES and folder in _SOURCES and file.endswith(".py"):
            return f"{'.'.join(parts[index:])}:{line} {name}"
    return ""
