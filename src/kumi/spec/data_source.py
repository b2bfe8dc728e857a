"""The options of a source of training data, and of how conversations become tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kumi.errors import ConfigError
from kumi.spec.field_docs import described

# The beginning of a path that means problems of reasoning-gym; `kumi.data.gym_source` reads the rest of the path.
GYM_SCHEME = "reasoning-gym:"
FORMATS = ("auto", "jsonl", "json", "parquet", "arrow", "text", "indexed")
# Kinds of rows; "auto" goes by the columns.
ROW_KINDS = ("auto", "text", "chat", "prompt-completion", "instruction", "preference", "feedback", "prompt")


def is_gym(path: str) -> bool:
    """Return True if the data path `path` names problems of reasoning-gym."""
    return path.startswith(GYM_SCHEME)


@dataclass(frozen=True)
class Source:
    """One source of documents or examples.

    commits: by path, commits of hub datasets that are read instead of the newest. A run that has begun has them in its
        folder, not in its run file.
    """

    path: str = described(
        "A file, folder, glob or hub dataset; {stdlib} is this Python's standard library. Problems of reasoning-gym "
        "are reasoning-gym:TASK?size=N&seed=N."
    )
    weight: float = described("Share of this source in the training data, relative to the others: `data.shares`.", 1.0)
    text_key: str = described("The field that holds the text, in JSONL and parquet.", "text")
    format: str = described(
        "How to read it; 'auto' goes by the suffix. 'indexed' is a Megatron .bin/.idx prefix.", "auto"
    )
    exclude: tuple[str, ...] = described("Globs of files to leave out.", ())
    kind: str = described(
        "What a row is; 'auto' goes by the columns, on which all rows of a source must agree.", "auto"
    )
    columns: Mapping[str, str] | None = described(
        "Columns of the files under other names: { messages = 'dialog' } reads `dialog` as `messages`.", None
    )
    epochs: float | None = described(
        "How often an epoch of the run reads this source. All sources have it, or none; shares follow from it instead "
        "of `weight`. With `train.steps`, only the ratios of these numbers count.",
        None,
    )
    max: int | None = described(
        "Use at most this many training units of the source, documents or examples, chosen by a hash of their content.",
        None,
    )
    validation: str | None = described(
        "Path of this source's own held-out data, in the same format; nothing of `path` is held out then.", None
    )

    commits: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise ConfigError(f"data source {self.path!r}: format={self.format!r} must be one of {', '.join(FORMATS)}")
        if self.kind not in ROW_KINDS:
            raise ConfigError(f"data source {self.path!r}: kind={self.kind!r} must be one of {', '.join(ROW_KINDS)}")
        if not (math.isfinite(self.weight) and self.weight > 0):
            raise ConfigError(f"data source {self.path!r}: weight={self.weight} must be a finite number above 0")
        if self.epochs is not None and not (math.isfinite(self.epochs) and self.epochs > 0):
            raise ConfigError(f"data source {self.path!r}: epochs={self.epochs} must be a finite number above 0")
        if self.max is not None and self.max < 1:
            raise ConfigError(f"data source {self.path!r}: max={self.max} must be at least 1")


# Values of `ChatOptions.turns`.
TURNS = ("all", "last")


@dataclass(frozen=True)
class ChatOptions:
    """How conversations become tokens, and which of the tokens are trained."""

    template: str | None = described(
        "A chat template: a path to a Jinja file, or the name of one of several in the tokenizer's folder; by default "
        "the tokenizer's chat_template.jinja, or chat_template in its tokenizer_config.json.",
        None,
    )
    template_kwargs: Mapping[str, Any] | None = described(
        "Arguments of the template, such as { enable_thinking = false }; a row's own chat_template_kwargs come first.",
        None,
    )
    date: str = described("The date, YYYY-MM-DD, for templates that write today's date.", "2025-01-01")
    turns: str = described("Replies to train: 'all' of a conversation, or its 'last'.", "all")
    stop_tokens: tuple[str, ...] = described(
        "Tokens that end a reply; by default those of eos_token_id in generation_config.json.", ()
    )
    timeout_s: float = described("Seconds that one conversation may take to render.", 5.0)
    memory_gib: float = described("Memory in GiB that a process which renders conversations may use.", 4.0)
    max_refused: float = described("Share of a source's rows that may be refused before the preparation stops.", 0.05)
