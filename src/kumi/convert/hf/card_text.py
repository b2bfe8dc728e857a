"""Read and edit the model card of a folder, README.md: its title, a key of its YAML header, a section of its text.

Everything else in the card stays as it is, byte for byte.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from kumi.errors import ConfigError
from kumi.files.output import refuse_link, write_text
from kumi.files.untrusted import read_bytes

CARD = "README.md"
# Three groups: the opening line ---, the YAML header, the closing line ---.
_HEADER = re.compile(r"(\ufeff?---[ \t]*\r?\n)(.*?)(^---[ \t]*(?:\r?\n|\Z))", re.S | re.M)
_TITLE = re.compile(r"^# +(.+?) *#*$", re.M)
# Characters that Markdown escapes with a backslash.
_ESCAPED = re.compile(r"\\([!-/:-@\[-`{-~])")


def folder_title(folder: Path) -> str:
    """Return the title of the card in `folder`, or else the name of the folder."""
    name = folder.resolve().name
    try:
        return title_of(read_card(folder)) or name
    except ConfigError:
        return name


def read_card(folder: Path) -> str:
    """Return the text of the card in `folder`, empty if there is none. Raise ConfigError unless it is UTF-8."""
    if not (folder / CARD).exists():
        return ""
    try:
        return read_bytes(folder, CARD, ConfigError).decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{folder / CARD}: is not UTF-8 text ({error}); save it as UTF-8") from None


def write_card(folder: Path, text: str) -> None:
    """Write `text` as the card of `folder`, atomically. Raise RefusedError if the card is a link."""
    refuse_link(folder / CARD)
    part = folder / f".{CARD}.kumi-part"
    write_text(part, text)
    os.replace(part, folder / CARD)


def title_of(text: str) -> str | None:
    """Return the first heading of a card, without escapes; None if it has none."""
    header = _HEADER.match(text)
    match = _TITLE.search(text, header.end() if header else 0)
    if match is None:
        return None
    return _ESCAPED.sub(r"\1", match[1]).replace("&lt;", "<").replace("&gt;", ">").strip()


def header_of(text: str) -> dict[str, Any]:
    """Return the YAML header of a card, empty if it has none. Raise ConfigError unless it is a mapping."""
    import yaml  # type: ignore[import-untyped]

    match = _HEADER.match(text)
    try:
        header = yaml.safe_load(match[2]) if match else {}
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{CARD}: its YAML header is not valid ({' '.join(str(error).split())}); correct it"
        ) from None
    header = {} if header is None else header
    if not isinstance(header, dict):
        raise ConfigError(f"{CARD}: its YAML header is a {type(header).__name__}, not keys with values; correct it")
    return header


def with_header_key(text: str, key: str, value: Any) -> str:
    """Return the card `text` with `value` under `key` of its header, in the place of an old value or at the end.

    Raise ConfigError if the header is not valid YAML, or not written with a key on each line.
    """
    import yaml

    expected = header_of(text) | {key: value}
    match = _HEADER.match(text)
    start, header, end = match.groups() if match else ("---\n", "", "---\n")
    body = text[match.end() :] if match else f"\n{text}" if text else ""
    new = yaml.safe_dump({key: value}, sort_keys=False, allow_unicode=True, width=1000)
    first, last = _lines_of(header, key)
    lines = header.splitlines(keepends=True)
    edited = "".join(lines[:first]) + new + "".join(lines[last:])
    try:
        same = yaml.safe_load(edited) == expected
    except yaml.YAMLError:
        same = False
    if not same:
        raise ConfigError(
            f"{CARD}: {key} cannot be written into its YAML header; write the header with one key on each line"
        )
    return f"{start}{edited}{end}{body}"


def _lines_of(header: str, key: str) -> tuple[int, int]:
    """Return the lines (first, end) of `header` that hold `key` and its value; the end of `header` without that key."""
    import yaml

    count = len(header.splitlines())
    node = yaml.compose(header)
    for place, (name, value) in enumerate(node.value if isinstance(node, yaml.MappingNode) else ()):
        if name.value != key:
            continue
        following = node.value[place + 1 :]
        end = following[0][0].start_mark.line if following else count
        lines = header.splitlines()
        # Comments and empty lines before the next key belong to the next key.
        while end > value.start_mark.line + 1 and (not lines[end - 1].strip() or lines[end - 1].startswith("#")):
            end -= 1
        return name.start_mark.line, end
    return count, count


def section_of(text: str, name: str) -> str:
    """Return the content of the section that `with_section` wrote under `name`; empty if there is none."""
    match = _find_section(text, name)
    return match[1] if match else ""


def with_section(text: str, name: str, content: str) -> str:
    """Return the card `text` with `content` between two comments with `name`: replaced there, or added at the end."""
    section = f"<!-- {name} -->\n{content}<!-- end of {name} -->"
    match = _find_section(text, name)
    if match:
        return text[: match.start()] + section + text[match.end() :]
    gap = "" if not text or text.endswith("\n\n") else "\n" if text.endswith("\n") else "\n\n"
    return f"{text}{gap}{section}\n"


def _find_section(text: str, name: str) -> re.Match[str] | None:
    """Return the match of a section, whose comments begin lines after the header."""
    header, word = _HEADER.match(text), re.escape(name)
    pattern = re.compile(rf"^<!-- {word} -->\n(.*?)^<!-- end of {word} -->", re.S | re.M)
    return pattern.search(text, header.end() if header else 0)
