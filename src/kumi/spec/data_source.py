"""A source of training documents."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kumi.errors import ConfigError
from kumi.spec.field_docs import described

FORMATS = ("auto", "jsonl", "parquet", "text", "indexed")


@dataclass(frozen=True)
class Source:
    """One source of documents."""

    path: str = described("A file, folder or glob; {stdlib} is this Python's standard library.")
    weight: float = described("Share of this source in the training tokens, relative to the others.", 1.0)
    text_key: str = described("The field that holds the text, in JSONL and parquet.", "text")
    format: str = described(
        "How to read it; 'auto' goes by the suffix. 'indexed' is a Megatron .bin/.idx prefix.", "auto"
    )
    exclude: tuple[str, ...] = described("Globs of files to leave out.", ())

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise ConfigError(f"data source {self.path!r}: format={self.format!r} must be one of {', '.join(FORMATS)}")
        if not (math.isfinite(self.weight) and self.weight > 0):
            raise ConfigError(f"data source {self.path!r}: weight={self.weight} must be a finite number above 0")
