"""Fields that say what they are for: a run file's key of the same meaning has its default and its text from here."""

from __future__ import annotations

from dataclasses import MISSING, field
from typing import Any


def described(text: str, default: Any = MISSING) -> Any:
    """Return a dataclass field with `text` as its description, a sentence for the readers of run files."""
    return field(default=default, metadata={"text": text})
