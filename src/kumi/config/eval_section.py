"""The section [eval] of a run file: evaluation on held-out data, and on tasks, during training."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field, model_validator

from kumi.config.section import NotNegative, Positive, Section, Text
from kumi.config.task_section import TaskSection, check_unique
from kumi.objectives import OBJECTIVES, LinearObjective, SequenceObjective

# Names of the metrics of held-out data, up to their first slash. A task has another name, because metrics of held-out
# data are eval/<metric> and eval/<metric>/<source>, and those of tasks eval/<task>/<metric>.
HELD_OUT_METRICS = frozenset({"loss", "tokens", "unigram_entropy"}) | {
    name.partition("/")[0]
    for objective in OBJECTIVES.values()
    for name in (
        *(objective.metrics if issubclass(objective, SequenceObjective) else ()),
        *(objective.evaluated if issubclass(objective, LinearObjective) else ()),
    )
}


class EvalSection(Section):
    """Evaluation on held-out documents, and on tasks."""

    every: NotNegative = Field(0, description="Steps between evaluations; 0 evaluates at the end only.")
    sequences: NotNegative = Field(0, description="Held-out sequences to evaluate, evenly spaced; 0 means all.")
    tasks: tuple[TaskSection, ...] = Field(
        (),
        description="Tasks, each a table [[eval.tasks]], whose metrics are `eval/<task>/<metric>`; their paths are "
        "relative to the folder of the command.",
    )
    task_files: tuple[Text, ...] = Field(
        (), description="Files with further tasks, the same as for `kumi eval --tasks`: tables [[tasks]]."
    )
    tasks_every: NotNegative | None = Field(
        None, description="Steps between evaluations of tasks; 0 evaluates them at the end only. By default `every`."
    )
    max_length: Positive | None = Field(
        None,
        description="Tokens that the model reads at most in tasks, for which memory is needed; by default "
        "`batch.seq_len`. The model's context is a limit, too.",
    )

    @property
    def has_tasks(self) -> bool:
        """Return True if tasks are evaluated."""
        return bool(self.tasks or self.task_files)

    @property
    def task_interval(self) -> int:
        """Return the number of steps between evaluations of tasks; 0 for the end only."""
        return self.every if self.tasks_every is None else self.tasks_every

    @model_validator(mode="after")
    def _check_tasks(self) -> EvalSection:
        """Refuse wrong names of tasks, and keys about tasks where there are none."""
        check_task_names(self.tasks)
        for key in ("tasks_every", "max_length"):
            if getattr(self, key) is not None and not self.has_tasks:
                raise ValueError(f"{key}={getattr(self, key)} has no tasks; add [[eval.tasks]], or remove the key")
        return self


def check_task_names(tasks: Sequence[TaskSection]) -> None:
    """Raise ValueError if two of `tasks` have the same name, or one has that of a metric of held-out data."""
    check_unique(tasks)
    for task in tasks:
        if task.name in HELD_OUT_METRICS:
            raise ValueError(
                f"the task name {task.name!r} is that of a metric of held-out data, eval/{task.name}; give the task "
                "another name"
            )


def is_task_metric(metric: str, section: EvalSection) -> bool:
    """Return True if `metric`, without the prefix "eval/", can only be that of a task of `section`."""
    return section.has_tasks and metric_head(metric) not in HELD_OUT_METRICS


def metric_head(metric: str) -> str:
    """Return the first part of the name `metric`: that of a task, or of a metric of held-out data."""
    return metric.partition("/")[0]
