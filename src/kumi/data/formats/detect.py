"""Detect the format of a source from its first rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from kumi.data.arrow_rows import TABLES, column_names
from kumi.data.formats.columns import (
    CHAT,
    Format,
    as_kind,
    check_columns,
    kind_of,
    missing_columns,
    no_kind,
    rename,
    split_columns,
)
from kumi.data.formats.messages import MESSAGE_KEYS
from kumi.data.row_files import read_rows
from kumi.errors import ConfigError
from kumi.spec.data_source import Source

# Rows from which a format is detected.
_SAMPLE = 64
# Formats without columns, which hold text or tokens only.
_PLAIN = ("text", "indexed")
_MESSAGE_COLUMNS = (*CHAT, "prompt", "completion", "chosen", "rejected")


def detect_source(source: Source, files: Sequence[tuple[Path, str]]) -> Format:
    """Return the format of `source`, from the first rows of its files, (path, format) each.

    Raise ConfigError when no kind fits, or the files cannot have the kind that the source sets.
    """
    check_columns(source.path, source.columns)
    tables = [(path, fmt) for path, fmt in files if fmt not in _PLAIN]
    if source.kind == "text" or len(tables) < len(files) or (source.kind == "auto" and source.text_key != "text"):
        if source.kind not in ("auto", "text"):
            raise ConfigError(
                f"data source {source.path!r}: kind={source.kind!r} needs rows with columns, and some of its files "
                "hold only text or tokens; leave them out with exclude"
            )
        return Format("text")
    return detect(_first_rows(tables), source)


def _first_rows(files: Sequence[tuple[Path, str]]) -> list[dict[str, Any]]:
    """Return the first rows of the first file that has any; if none can be read, a row with all columns of a table."""
    for path, fmt in files:
        items = islice(read_rows(path, fmt), _SAMPLE)
        rows = [item[1] for item in items if isinstance(item, tuple)]
        if rows:
            return rows
    names = next(filter(None, (column_names(path, fmt) for path, fmt in files if fmt in TABLES)), [])
    return [dict.fromkeys(names, "")] if names else []


def detect(rows: Iterable[Mapping[str, Any]], source: Source) -> Format:
    """Return the format of `source` whose first rows are `rows`: the kind of most of them, unless the source sets one.

    Without rows it is "text". Raise ConfigError when no kind fits.
    """
    columns = dict(source.columns or {})
    samples = [{name: value for name, value in row.items() if value is not None} for row in rows]
    names = list(dict.fromkeys(name for sample in samples for name in sample))
    absent = sorted(set(columns.values()) - set(names)) if samples else []
    if absent:
        raise ConfigError(
            f"data source {source.path!r}: columns names {absent[0]!r}, but the first {len(samples)} rows have only "
            f"{', '.join(sorted(names)[:12])}"
        )
    renamed = [set(rename(columns, sample).values()) for sample in samples]
    if source.kind == "auto":
        kinds = Counter(kind for row in renamed if (kind := kind_of(row, source.text_key)) is not None)
        _refuse_ambiguous(source, renamed)
        if not kinds and samples:
            raise no_kind(source.path, names)
        kind = kinds.most_common(1)[0][0] if kinds else "text"
    else:
        kind = as_kind(source.kind)
        lacking = [missing_columns(kind, row) for row in renamed]
        if lacking and all(lacking):
            raise ConfigError(
                f"data source {source.path!r}: kind={kind!r} needs {lacking[0]}, but its rows have only "
                f"{', '.join(sorted(names)[:12])}; name them in columns, such as {{ messages = 'dialog' }}"
            )
    if kind == "text":
        return Format("text", forced=source.kind == "text")
    used, ignored = split_columns(kind, columns, names)
    keys = [key for name in used for key in _ignored_keys(name, columns, samples)]
    return Format(kind, columns, tuple(used), (*ignored, *keys), source.kind != "auto")


def _refuse_ambiguous(source: Source, rows: Sequence[set[str]]) -> None:
    """Raise ConfigError for rows with messages and a pair, where neither is the prompt of the other."""
    if any({"messages", "chosen", "rejected"} <= row for row in rows):
        raise ConfigError(
            f"data source {source.path!r}: its rows have messages and also chosen and rejected; set kind to 'chat' to "
            "train on messages, or to 'preference' to compare the pair"
        )


def _ignored_keys(name: str, columns: Mapping[str, str], samples: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the keys of messages in the column `name` that are not read, as "messages[].id"."""
    if rename(columns, [name]).get(name) not in _MESSAGE_COLUMNS:
        return []
    keys: dict[str, None] = {}
    for sample in samples:
        messages = sample.get(name)
        for message in messages if isinstance(messages, list) else [messages]:
            if isinstance(message, dict):
                keys.update(dict.fromkeys(key for key, value in message.items() if value is not None))
    return [f"{name}[].{key}" for key in keys if key not in MESSAGE_KEYS]
