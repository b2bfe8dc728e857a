"""Dataclass fields with a description, from which the run-file key of the same meaning takes its default and text."""

from __future__ import annotations

from dataclasses import MISSING, field
from typing import Any


def described(text: str, default: Any = MISSING, choices: tuple[str, ...] = ()) -> Any:
    """Return a dataclass field with the description `text`, which is shown to readers of run files.

    `choices`: the values of a field that takes one of a list.
    """
    return field(default=default, metadata={"text": text, "choices": choices})
