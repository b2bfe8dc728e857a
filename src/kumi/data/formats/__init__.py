"""Rows of files to examples: detect the format of a source by its columns, and convert each row.

columns (kinds by columns) -> detect (the format of a source) -> convert (a row to an Example) -> messages (spellings)
"""

from __future__ import annotations

from kumi.data.formats.columns import Format, split_columns
from kumi.data.formats.convert import to_example
from kumi.data.formats.detect import detect, detect_source
from kumi.data.formats.example import ROLES, Conversation, Example, PlainText, RowKind

__all__ = [
    "ROLES",
    "Conversation",
    "Example",
    "Format",
    "PlainText",
    "RowKind",
    "detect",
    "detect_source",
    "split_columns",
    "to_example",
]
