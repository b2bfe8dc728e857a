"""Conversations to tokens: chat templates of unknown origin, rendered within limits, and masks of trained tokens."""

from __future__ import annotations

from kumi.data.chat.masked import EncodedUnit, MaskedSequence, RowRefused

__all__ = ["EncodedUnit", "MaskedSequence", "RowRefused"]
