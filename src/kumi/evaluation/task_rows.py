"""Read the rows of a task's file, and the texts in them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kumi.config.task_section import TaskSection
from kumi.data.gym_source import gym_file
from kumi.data.gym_task import row_scorer
from kumi.data.records import Fault, read
from kumi.data.row_files import read_rows
from kumi.data.sources import file_format
from kumi.errors import ConfigError
from kumi.files.untrusted import brief
from kumi.inference.prompt_encoder import Prompt
from kumi.paths import shown_path
from kumi.rewards.answers import answers_in
from kumi.spec.data_source import is_gym

Row = Mapping[str, Any]  # column -> value
# {column} in the template of a prompt.
_PLACEHOLDER = re.compile(r"\{(\w+)\}")


def documents(task: TaskSection) -> list[str]:
    """Return the texts of a task of perplexity. Documents without text are left out."""
    path = _existing(task)
    items = [item for item in read(path, text_key=task.text_key) if not _is_empty(item)]
    return [item.text for item in _checked(items, task)]


def _is_empty(item: Any) -> bool:
    return isinstance(item, Fault) and item.kind == "empty"


def rows(task: TaskSection) -> list[tuple[str, Row]]:
    """Return the rows of a task's file, each with its place (file:line) for messages."""
    path = _existing(task)
    form = file_format(path)
    if form not in ("jsonl", "json", "parquet", "arrow"):
        raise ConfigError(f"task {task.name}: {path} has no rows; name a .jsonl, .json or .parquet file")
    items = _checked(list(read_rows(path, form)), task)
    return [(f"{path}:{line}", columns) for line, columns in items]


def _existing(task: TaskSection) -> Path:
    """Return the file of `task`; a file of generated problems for a task of reasoning-gym."""
    if is_gym(task.path):
        return gym_file(task.path)
    path = Path(task.path).expanduser()
    if not path.is_file():
        raise ConfigError(f"task {task.name}: {shown_path(path)} is not a file; correct its path")
    return path


def _checked(items: Sequence[Any], task: TaskSection) -> list[Any]:
    """Return `items`. Raise ConfigError if there are none, or if one is a Fault: a score without it would mislead."""
    for item in items:
        if isinstance(item, Fault):
            raise ConfigError(f"task {task.name}: {item.file}:{item.line}: {item.reason}; correct the file")
    if not items:
        raise ConfigError(f"task {task.name}: {task.path} is empty; name a file with data")
    return list(items)


def prompt_of(task: TaskSection, place: str, row: Row) -> str:
    """Return the prompt of `row`: the template with the row's columns."""
    return _PLACEHOLDER.sub(lambda match: _text(task, place, row, match[1]), task.prompt)


def _text(task: TaskSection, place: str, row: Row, key: str) -> str:
    """Return the column `key` of `row`, a text or a number, as text."""
    value = _column(task, place, row, key)
    if isinstance(value, str | int | float) and not isinstance(value, bool):
        return str(value)
    raise ConfigError(f"task {task.name}: {place}: column {key!r} is {brief(value)}, not a text; correct the row")


def _column(task: TaskSection, place: str, row: Row, key: str) -> Any:
    """Return the column `key` of `row`. Raise ConfigError if the row does not have it."""
    if key not in row:
        raise ConfigError(
            f"task {task.name}: {place}: no column {key!r}; it has {', '.join(row)}; correct the row or the task"
        )
    return row[key]


def choices_of(task: TaskSection, place: str, row: Row) -> list[str]:
    """Return the choices of `row`, at least two texts."""
    value = _column(task, place, row, task.choices_key)
    if not isinstance(value, list) or len(value) < 2 or not all(isinstance(text, str) and text for text in value):
        raise ConfigError(
            f"task {task.name}: {place}: column {task.choices_key!r} is {brief(value)}, not a list of two or more "
            "texts; correct the row"
        )
    return list(value)


def right_choice(task: TaskSection, place: str, row: Row, choices: Sequence[str]) -> int:
    """Return the index of the right one of `choices`, which the row gives as a number from 0 or as the text."""
    value = _column(task, place, row, task.answer_key)
    if type(value) is int and 0 <= value < len(choices):
        return value
    if isinstance(value, str) and choices.count(value) == 1:
        return choices.index(value)
    raise ConfigError(
        f"task {task.name}: {place}: column {task.answer_key!r} is {brief(value)}, neither an index from 0 to "
        f"{len(choices) - 1} nor one of the choices; correct the row"
    )


def problem_of(task: TaskSection, place: str, row: Row) -> tuple[Prompt, Callable[[str], float]]:
    """Return the prompt of `row`, a problem of reasoning-gym, and its scorer."""
    prompt = _column(task, place, row, "prompt")
    if not isinstance(prompt, str) and not task.chat:
        raise ConfigError(
            f"task {task.name}: {place}: column 'prompt' is {brief(prompt)}, not a text; set chat=true for messages"
        )
    try:
        return prompt, row_scorer(row, task.tag)
    except ValueError as error:
        raise ConfigError(f"task {task.name}: {place}: {error}; correct the row") from None


def answers_of(task: TaskSection, place: str, row: Row) -> list[str]:
    """Return the answers of `row` that count as right: a text, a number, or a list of them."""
    value = _column(task, place, row, task.answer_key)
    answers = answers_in(value)
    if answers is None:
        raise ConfigError(
            f"task {task.name}: {place}: column {task.answer_key!r} is {brief(value)}, neither a text nor a list of "
            "texts; correct the row"
        )
    return answers
