"""The rows of sources and of other files as texts, with their place."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from kumi.data.chat.masked import RowRefused
from kumi.data.formats import Example, Format, PlainText, detect_source, to_example
from kumi.data.hygiene.hashed_words import text_digest
from kumi.data.record_files import Fault
from kumi.data.records import Record, read_range
from kumi.data.row_files import read_rows
from kumi.data.sources import expand, file_format
from kumi.errors import ConfigError
from kumi.spec.data_source import Source


@dataclass(frozen=True, slots=True)
class TextRow:
    """The text of a row, and where it is; lines count as in `kumi.data.records`.

    label: of a row of feedback, whether its completion is desirable.
    """

    file: str
    line: int
    text: str
    label: bool | None = None

    @property
    def digest(self) -> str:
        """The digest that the row shares with its exact duplicates."""
        return text_digest(self.text, self.label)


def example_row(example: Example) -> TextRow:
    """Return the row of an example: the contents of its messages, with thoughts and tool calls.

    Of the second side of a preference, only the contents after those that both sides begin with.
    """
    return TextRow(example.file, example.line, "\n".join(example_texts(example)), example.label)


def example_texts(example: Example) -> list[str]:
    """Return the texts that `example_row` joins."""
    texts, *others = (list(_side_texts(side)) for side in example.sides)
    for other in others:
        shared = takewhile(lambda pair: pair[0] == pair[1], zip(texts, other, strict=False))
        texts += other[len(list(shared)) :]
    return texts


def _side_texts(side: Any) -> Iterator[str]:
    """Yield the texts of one side of an example: a prompt and completion, or the messages of a conversation."""
    if isinstance(side, PlainText):
        yield from (side.prompt, side.completion)
        return
    for message in side.messages:
        yield from (message[key] for key in ("reasoning_content", "content") if message.get(key))
        if message.get("tool_calls"):
            yield json.dumps(message["tool_calls"], sort_keys=True, ensure_ascii=False, default=str)


def training_files(source: Source) -> tuple[Format, list[tuple[Path, str]]]:
    """Return the format of the rows of `source`, and its files with their formats, except files of tokens."""
    files = [(path, file_format(path, source.format) or "") for path in expand(source)]
    tables = [item for item in files if item[1] != "indexed"]
    return detect_source(source, files), tables


def with_validation(source: Source) -> list[Source]:
    """Return the validation data of `source` as a source, if it has its own, then `source` without them.

    In this order the copies in the training data count as the duplicates.
    """
    own = [] if source.validation is None else [replace(source, path=source.validation, validation=None)]
    return [*own, replace(source, validation=None)]


def source_rows(source: Source, without: Collection[str] = ()) -> Iterator[TextRow | Fault]:
    """Yield the rows of `source` in order, except those of the files `without`; a Fault for each unusable row."""
    fmt, files = training_files(source)
    for path, kind in files:
        if str(path) in without:
            continue
        if fmt.kind == "text":
            yield from map(_record_row, read_range(path, kind, source.text_key))
        else:
            for item in read_rows(path, kind, fmt.reads):
                yield item if isinstance(item, Fault) else _converted(fmt, str(path), *item)


def _record_row(item: Record | Fault) -> TextRow | Fault:
    return item if isinstance(item, Fault) else TextRow(item.file, item.line, item.text)


def _converted(fmt: Format, file: str, line: int, row: dict[str, Any]) -> TextRow | Fault:
    """Return the texts of a row of examples; a Fault if it is not one of the format `fmt`."""
    try:
        return example_row(to_example(fmt, row, file, line))
    except RowRefused as error:
        return Fault(file, line, error.kind, error.reason)


def file_rows(path: Path) -> Iterator[TextRow | Fault]:
    """Yield the rows of any file of records with all their texts, or a text file as one row.

    Raise ConfigError for a suffix of no known format.
    """
    fmt = file_format(path)
    if fmt is None or not path.is_file():
        reason = "its suffix is of no known format" if path.is_file() else "it is no file"
        raise ConfigError(
            f"{path}: cannot be compared with the data, because {reason}; name a JSONL, parquet or txt file"
        )
    if fmt == "text":
        yield from map(_record_row, read_range(path, fmt, "text"))
        return
    for item in read_rows(path, fmt):
        yield item if isinstance(item, Fault) else TextRow(str(path), item[0], "\n".join(_strings(item[1])))


def _strings(value: Any) -> Iterator[str]:
    """Yield all texts inside a JSON value; not the names of its fields."""
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, dict):
            waiting.extend(reversed(item.values()))
        elif isinstance(item, Sequence) and not isinstance(item, bytes):
            waiting.extend(reversed(item))
