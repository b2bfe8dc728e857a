"""Tasks of reasoning-gym: problems that are made on this machine, their answers, and scorers of a model's answers.

    row = {"prompt": "What is 2 + 3?", "answer": "5", "reasoning_gym": {"task": ..., "answer": "5", "metadata": ...}}
    row_scorer(row, "answer")("It is <answer>5</answer>.") == 1.0

The package makes problem n of a seed from the number seed + n. The package is an extra, `pip install
'kumi[reasoning]'`, and is imported when the first task is opened.
"""

from __future__ import annotations

import ast
import builtins
import functools
import hashlib
import inspect
import json
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from importlib.metadata import PackageNotFoundError, version
from types import FunctionType
from typing import Any

from kumi.errors import ConfigError
from kumi.files.untrusted import brief

PACKAGE = "reasoning-gym"
# The column of a row with what its scorer needs.
COLUMN = "reasoning_gym"
# The problems to train on, and those to evaluate on; one in _TEST_ONE_IN problems is of "test".
SPLITS = ("train", "test")
_TEST_ONE_IN = 10
# A task counts as exhausted after so many successive problems that are repeated, or of the other split.
_MOST_REPEATED = 10_000
# Functions that run a text as Python -> the packages that have them.
_EVALUATING = {"eval": "builtins", "exec": "builtins", "parse_expr": "sympy", "sympify": "sympy"}


def load_package() -> None:
    """Import the package, which takes seconds. Raise ConfigError if it is not installed."""
    _package()


def package_version() -> str:
    """Return the version of the installed package, on which problems depend. Raise ConfigError without it."""
    try:
        return version(PACKAGE)
    except PackageNotFoundError:
        raise ConfigError(
            f"{PACKAGE} is not installed, and a task of it is asked for; pip install 'kumi[reasoning]'"
        ) from None


def problem_rows(task: str, config: Mapping[str, Any], seed: int, size: int, split: str) -> Iterator[dict[str, Any]]:
    """Yield the first `size` different problems of `split` as rows: a pure function of the arguments and the package.

    config: keys of the task's configuration in the package. split: one of `SPLITS`; a hash of a problem's text decides
    its split, so that no problem of "test" is in "train", whatever the seeds. Raise ConfigError for a task or a key
    that the package lacks, and for a task with fewer than `size` problems of the split.
    """
    # Repeated problems and those of the other split are left out, so the dataset must have more than `size`: about 10/9
    # as many for "train", 10 times as many for "test", and as many again for repeated ones. Most tasks make any number
    # of problems one by one, whatever the size of the dataset; a few make all of them at once, and have no others.
    made = (2 if split == "train" else 2 * _TEST_ONE_IN) * size + 100
    dataset = _dataset(task, _frozen(config), seed, made)
    # A scorer that runs texts as Python is not called, not even to check the problem's own answer.
    is_safe = evaluating_function(task) is None
    questions, repeated, number = set[str](), 0, 0
    while len(questions) < size:
        problem = _problem(task, dataset, number) if repeated < _MOST_REPEATED else None
        number += 1
        if problem is None:
            raise ConfigError(
                f"{PACKAGE}:{task}: there are {len(questions)} different problems of split={split!r} with these "
                f"keys, and size={size}; lower it, or make the problems more various"
            )
        question = problem["question"]
        if question in questions or split_of(question) != split:
            repeated += 1
            continue
        repeated = 0
        questions.add(question)
        yield _row(task, config, problem, dataset if is_safe else None)


def _problem(task: str, dataset: Any, number: int) -> Mapping[str, Any] | None:
    """Return problem `number` of `dataset`; None if it has no more. Raise ConfigError if the task's keys are wrong."""
    try:
        problem: Mapping[str, Any] = dataset[number]
        return problem
    except Exception as error:
        if isinstance(error, IndexError) and number >= len(dataset):
            return None
        raise ConfigError(
            f"{PACKAGE}:{task}: problem {number} cannot be made ({type(error).__name__}: {error}); correct the keys"
        ) from None


def split_of(question: str) -> str:
    """Return the split of a problem, by a hash of its text."""
    digest = hashlib.blake2b(question.encode(), digest_size=8).digest()
    return SPLITS[int.from_bytes(digest) % _TEST_ONE_IN == 0]


def _row(task: str, config: Mapping[str, Any], problem: Mapping[str, Any], scorer: Any) -> dict[str, Any]:
    """Return the row of `problem`.

    scorer: the task's dataset, which also scores answers; None for no check. Raise ConfigError if it scores the
    problem's answer otherwise with the row, in which JSON has changed or lost some of the metadata.
    """
    plain = json.loads(json.dumps(problem["metadata"], default=str))
    answer = problem["answer"]
    # The answer twice: rewards of other kinds read the column `answer`.
    column = {"task": task, "config": config, "answer": answer, "metadata": plain}
    row = {"prompt": problem["question"], "answer": answer, COLUMN: column}
    if scorer is not None and answer is not None:
        own = float(scorer.score_answer(answer, problem))
        if _score(scorer, answer, row) != own:
            raise ConfigError(
                f"{PACKAGE}:{task}: its scorer needs metadata that a row of JSON cannot have, so that the problem's "
                f"own answer does not get its score of {own:g}; use another task"
            )
    return row


def system_prompt(name: str) -> str:
    """Return the system prompt `name` of the package. Raise ConfigError if there is none."""
    prompts: Mapping[str, str] = _package().utils.SYSTEM_PROMPTS
    if name not in prompts:
        raise ConfigError(f"{PACKAGE}: system={name!r} is none of its system prompts, {', '.join(prompts)}; name one")
    return prompts[name]


def row_scorer(row: Mapping[str, Any], tag: str) -> Callable[[str], float]:
    """Return the task's own scorer of replies to the problem in `row`.

    It scores a reply's last answer between <tag> and </tag>, or the whole reply if `tag` is empty; a reply without an
    answer scores 0. Raise ValueError for a row without a problem, ConfigError for a task that the package lacks, or
    whose scorer runs replies as Python.
    """
    column = row.get(COLUMN)
    if not isinstance(column, Mapping) or not isinstance(column.get("task"), str):
        raise ValueError(f"column {COLUMN!r} is {brief(column)}, not a problem of {PACKAGE}")
    check_scorer(column["task"])
    scorer = _dataset(column["task"], _frozen(column.get("config") or {}), 0, 1)
    extract = _package().utils.extract_answer

    def score(reply: str) -> float:
        answer = extract(reply, tag) if tag else reply.strip()
        return 0.0 if answer is None else _score(scorer, answer, row)

    return score


def _score(scorer: Any, answer: str, row: Mapping[str, Any]) -> float:
    """Return the score of `answer` to the problem in `row`."""
    # The question is left out, because no scorer reads it.
    problem = {"answer": row[COLUMN].get("answer"), "metadata": row[COLUMN].get("metadata") or {}}
    return float(scorer.score_answer(answer, problem))


def check_scorer(task: str) -> None:
    """Raise ConfigError if the scorer of `task` runs text of a reply or a row as Python."""
    function = evaluating_function(task)
    if function is not None:
        raise ConfigError(
            f"{PACKAGE}:{task}: its scorer calls {function}, which runs text of a reply or a row as Python, and kumi "
            f"runs that only in a sandbox; use another task, or another kind of reward"
        )


@functools.cache
def evaluating_function(task: str) -> str | None:
    """Return the name of a function that runs a text as Python and that the scorer of `task` calls; None if it calls
    none.
    """
    task_class, _ = _registered(task)
    return _evaluating_call(task_class.score_answer, task_class, set())


def _evaluating_call(function: FunctionType, owner: type, seen: set[FunctionType]) -> str | None:
    """Return the name of the first call in `function`, a method of `owner`, that runs a text as Python.

    Functions and methods of the package that `function` calls are searched, too.
    """
    seen.add(function)
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function)))):
        if not isinstance(node, ast.Call):
            continue
        called, name = _called(node.func, function, owner)
        if (getattr(called, "__module__", None) or "").split(".")[0] == _EVALUATING.get(name):
            return name
        if isinstance(called, FunctionType) and called.__module__.startswith("reasoning_gym") and called not in seen:
            inner = _evaluating_call(called, owner, seen)
            if inner is not None:
                return inner
    return None


def _called(written: ast.expr, function: FunctionType, owner: type) -> tuple[Any, str]:
    """Return the object that `written`, the callee of a call in `function`, stands for, and its name.

    The object is None if it cannot be looked up by names in the module or in `owner`, such as the result of a call.
    """
    if isinstance(written, ast.Name):
        return function.__globals__.get(written.id, getattr(builtins, written.id, None)), written.id
    if isinstance(written, ast.Attribute) and isinstance(written.value, ast.Name):
        holder = owner if written.value.id in ("self", "cls") else function.__globals__.get(written.value.id)
        return getattr(holder, written.attr, None), written.attr
    return None, ""


@functools.lru_cache(maxsize=64)
def _dataset(task: str, config: str, seed: int, size: int) -> Any:
    """Return `size` problems of `task` as the package's dataset. `config`: a result of `_frozen`."""
    task_class, config_class = _registered(task)
    keys = json.loads(config)
    names = [field.name for field in fields(config_class) if field.name not in ("seed", "size")]
    unknown = next((key for key in keys if key not in names), None)
    if unknown is not None:
        raise ConfigError(f"{PACKAGE}:{task}: {unknown} is not a key of this task; its keys are {', '.join(names)}")
    try:
        configured = config_class(**keys, seed=seed, size=size)
        if hasattr(configured, "validate"):  # a few tasks have none
            configured.validate()
        return task_class(configured)
    except (AssertionError, TypeError, ValueError) as error:
        raise ConfigError(f"{PACKAGE}:{task}: the keys {config} are refused ({error}); correct them") from None


def _frozen(config: Mapping[str, Any]) -> str:
    return json.dumps(config, sort_keys=True)


def _registered(task: str) -> tuple[Any, Any]:
    """Return the classes of `task` and of its configuration. Raise ConfigError if the package has no such task."""
    tasks = _package().factory.DATASETS
    if task == "composite":
        raise ConfigError(f"{PACKAGE}:composite: mixes other tasks; give each its own table [[data.sources]] instead")
    if task not in tasks:
        raise ConfigError(f"{PACKAGE}:{task}: there is no such task; the package has {', '.join(sorted(tasks))}")
    classes: tuple[Any, Any] = tasks[task]
    return classes


@functools.cache
def _package() -> Any:
    """Return the module reasoning_gym, which has no types. Raise ConfigError if it is not installed."""
    package_version()
    import reasoning_gym
    import reasoning_gym.factory
    import reasoning_gym.utils

    return reasoning_gym
