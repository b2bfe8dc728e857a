"""Texts with {names} that are replaced by values."""

from __future__ import annotations

import re
from collections.abc import Callable

_PLACEHOLDER = re.compile(r"\{(\w+)\}")


def names_in(template: str) -> list[str]:
    """Return the names in `template`, each once, in their order."""
    return list(dict.fromkeys(_PLACEHOLDER.findall(template)))


def fill(template: str, value_of: Callable[[str], str]) -> str:
    """Return `template` with each {name} replaced by `value_of(name)`; names inside of values are left as they are."""
    return _PLACEHOLDER.sub(lambda match: value_of(match[1]), template)
