"""Answers of a row, and the comparison of texts with them, for rewards and for tasks of evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def answers_in(value: Any) -> list[str] | None:
    """Return the answers in a column: a text, a number, or a list of them; None if `value` is anything else."""
    values = value if isinstance(value, list) and value else [value]
    if not all(isinstance(item, str | int | float) and not isinstance(item, bool) for item in values):
        return None
    return [str(item) for item in values]


def is_answer(text: str, answers: Sequence[str]) -> bool:
    """Return True if `text` is one of `answers`. White space around both is ignored."""
    return text.strip() in {answer.strip() for answer in answers}
