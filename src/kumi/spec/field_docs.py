"""Dataclass fields with a description, from which the run-file key of the same meaning takes its default and text."""

from __future__ import annotations

from dataclasses import MISSING, field
from typing import Any


def described(text: str, default: Any = MISSING) -> Any:
    """Return a dataclass field with the description `text`, which is shown to readers of run files."""
    return field(default=default, metadata={"text": text})
