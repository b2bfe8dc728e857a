"""Rows of files to examples: detect the format of a source by its columns, and convert each row."""

from __future__ import annotations

from kumi.data.formats.example import Conversation, Example, PlainText

__all__ = ["Conversation", "Example", "PlainText"]
