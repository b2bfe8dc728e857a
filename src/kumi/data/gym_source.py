"""Data paths that name problems of reasoning-gym; the problems are made as rows of a JSONL file in the cache.

    reasoning-gym:chain_sum?size=5000&seed=1&max_terms=3

    size    number of different problems; by default 1000
    seed    of the first problem; by default 0
    split   "train", or "test" for the tenth of all problems that "train" never has
    chat    true for prompts that are messages of a user, for the chat template
    system  a system prompt of the package by its name, such as "direct", which asks for answers between tags
            (implies chat)

Other keys are those of the task's configuration in the package, with values as JSON or as text; %26 is an ampersand.

The file depends on the path and the version of the package alone.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from kumi.data.gym_task import SPLITS, check_scorer, package_version, problem_rows, system_prompt
from kumi.errors import ConfigError
from kumi.files.output import open_new
from kumi.remote.cache_folder import FILES, copy_of, making
from kumi.spec.data_source import GYM_SCHEME

_ROWS = "problems.jsonl"
# Keys that are not the task's -> the values that they take, in words and as a check.
_OWN_KEYS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "size": ("a number above 0", lambda value: type(value) is int and value > 0),
    "seed": ("a number from 0 to 2147483647", lambda value: type(value) is int and 0 <= value < 2**31),
    "split": (f"one of {', '.join(SPLITS)}", lambda value: value in SPLITS),
    "chat": ("true or false", lambda value: isinstance(value, bool)),
    "system": ("a name", lambda value: isinstance(value, str)),
}


def check_scored(path: str) -> None:
    """Raise ConfigError if the scorer of the problems that `path` names cannot be a reward."""
    check_scorer(_parse(path).task)


@dataclass(frozen=True)
class _Problems:
    """The problems that a data path names; see the module's docstring. `config`: values of the task's own keys."""

    task: str
    config: Mapping[str, Any]
    size: int = 1000
    seed: int = 0
    split: str = "train"
    chat: bool = False
    system: str | None = None


@functools.cache
def gym_file(path: str) -> Path:
    """Return a JSONL file with the rows of the data path `path`; make the file unless the cache has it.

    Raise ConfigError for a path that is wrong, and if the package is not installed.
    """
    problems = _parse(path)
    copy = copy_of(FILES, f"{path} {package_version()}")
    file = copy / _ROWS
    with making(copy):
        if not file.is_file():
            part = file.with_suffix(".part")
            with open_new(part) as lines:
                for row in problem_rows(problems.task, problems.config, problems.seed, problems.size, problems.split):
                    lines.write(json.dumps(row | {"prompt": _prompt(problems, row["prompt"])}) + "\n")
            # Prepared data depend on the file's time: a file that is made anew must count as the same file.
            os.utime(part, (0, 0))
            os.replace(part, file)
    return file


def _prompt(problems: _Problems, question: str) -> str | list[dict[str, str]]:
    """Return `question` as text, or as messages if the path sets `chat` or `system`."""
    if not problems.chat and problems.system is None:
        return question
    system = [] if problems.system is None else [{"role": "system", "content": system_prompt(problems.system)}]
    return [*system, {"role": "user", "content": question}]


def _parse(path: str) -> _Problems:
    """Return the problems that `path` names. Raise ConfigError for a value that is wrong."""
    task, _, query = path.removeprefix(GYM_SCHEME).partition("?")
    keys: dict[str, Any] = {}
    for text in filter(None, query.split("&")):
        name, equals, value = text.partition("=")
        if not equals or name in keys:
            reason = "has no value" if not equals else "is given twice"
            raise ConfigError(f"data source {path!r}: {name} {reason}; write it once, as {name}=VALUE")
        keys[name] = _value(unquote(value))
    own = {name: keys.pop(name) for name in _OWN_KEYS if name in keys}
    for name, (expected, is_right) in _OWN_KEYS.items():
        if name in own and not is_right(own[name]):
            raise ConfigError(f"data source {path!r}: {name}={own[name]} is not {expected}; correct it")
    return _Problems(task, keys, **own)


def _value(text: str) -> Any:
    """Return the value of the JSON `text`, or `text` itself if it is no JSON."""
    try:
        return json.loads(text)
    except ValueError:
        return text
