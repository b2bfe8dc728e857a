"""Globs of data sources, as regular expressions over complete paths."""

from __future__ import annotations

import os
import re
import sysconfig


def glob_regex(pattern: str) -> re.Pattern[str]:
    """Return a regex that matches full absolute paths; a relative pattern matches below any folder."""
    text = os.path.expanduser(pattern).replace("{stdlib}", sysconfig.get_paths()["stdlib"])
    if not text.startswith(("/", "**")):
        text = "**/" + text
    parts = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]", "[[]": "\\[", "[*]": "\\*", "[?]": "\\?"}
    tokens = re.split(r"(\[[\[*?]\]|\*\*/|\*\*|\*|\?)", text)
    return re.compile("".join(parts.get(token, re.escape(token)) for token in tokens))


def is_skipped(name: str) -> bool:
    """Return True for the name of a file or folder that a folder's source leaves out: hidden ones and __pycache__."""
    return name.startswith(".") or name == "__pycache__"
