"""Read files of evaluation tasks: TOML with one table [[tasks]] per task."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, ValidationError, model_validator

from kumi.config.eval_section import EvalSection, check_task_names
from kumi.config.load import read_toml
from kumi.config.section import Section
from kumi.config.task_section import TaskSection, check_unique
from kumi.config.validation_messages import describe_errors
from kumi.errors import ConfigError


class TaskFile(Section):
    """A file of tasks."""

    tasks: tuple[TaskSection, ...] = Field(
        min_length=1, description="The tasks.", examples=[[{"name": "quiz", "kind": "multiple_choice"}]]
    )

    @model_validator(mode="after")
    def _check_names(self) -> TaskFile:
        check_unique(self.tasks)
        return self


def load_tasks(path: str | Path) -> tuple[TaskSection, ...]:
    """Return the tasks in the TOML file `path`; their paths are relative to its folder.

    Raise ConfigError for an unreadable file, an unknown key, or a value that a key does not allow.
    """
    path = Path(path)
    try:
        tasks = TaskFile.model_validate(read_toml(path)).tasks
    except ValidationError as error:
        raise ConfigError(f"{path}: {describe_errors(error, TaskFile)}") from None
    return tuple(task.model_copy(update={"path": str(path.parent / Path(task.path).expanduser())}) for task in tasks)


def with_tasks_of_files(section: EvalSection) -> EvalSection:
    """Return `section` with the tasks of its task_files among its tasks.

    Raise ConfigError for a file that cannot be read, and for a name that two tasks or a task and a metric have.
    """
    if not section.task_files:
        return section
    tasks = (*section.tasks, *(task for file in section.task_files for task in load_tasks(Path(file).expanduser())))
    try:
        check_task_names(tasks)
    except ValueError as error:
        raise ConfigError(f"eval.task_files: {error}") from None
    return section.model_copy(update={"tasks": tasks, "task_files": ()})


def perplexity_task(name: str, file: str, text_key: str) -> TaskSection:
    """Return the task `name`, the perplexity of the texts of `file`. Raise ConfigError for a file of unknown format."""
    try:
        return TaskSection(name=name, kind="perplexity", path=file, text_key=text_key)
    except ValidationError as error:
        raise ConfigError(f"--data {describe_errors(error, TaskSection)}") from None
