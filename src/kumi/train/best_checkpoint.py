"""The best evaluation of a run by one of its metrics: which checkpoint to keep, and when to stop early.

Both are computed from the evaluations in metrics.jsonl and the checkpoints on disk. A resumed run therefore decides as
if it had not been interrupted, also if `checkpoint.best` or `train.patience` was added or changed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from kumi.config.eval_section import HELD_OUT_METRICS, metric_head
from kumi.config.task_section import TaskSection
from kumi.errors import ConfigError
from kumi.evaluation.task_result import HIGHER_IS_BETTER, METRICS_OF_KIND
from kumi.files.output import replace_text
from kumi.objectives import LinearObjective, Objective, SequenceObjective
from kumi.storage.folders import BEST, checkpoint_root, latest, list_complete, step_of
from kumi.train.metrics import read_metrics

# Metrics that are better when lower, and metrics that are better when higher. Those of one source of data are named
# <metric>/<source>.
_LOWER = ("loss", "kl", "entropy")
_HIGHER = ("rewards/accuracies", "rewards/margins", "rewards/chosen", "logps/chosen", "mean_token_accuracy")


class BestSoFar:
    """The best value of `metric` among the evaluations of a run that have a checkpoint.

    `higher`: True if higher values are better.
    `step`, `value`: the step and the metric's value of the best evaluation; None before the first.
    `since`: the number of evaluations after the best one.
    """

    def __init__(
        self, metric: str, entries: Iterable[Mapping[str, Any]] = (), stored: Collection[int] | None = None
    ) -> None:
        """`entries`: the entries of metrics.jsonl. `stored`: the steps with a checkpoint; None for all steps."""
        self.metric, self.higher = metric, is_higher_better(metric)
        self.step: int | None = None
        self.value: float | None = None
        self.since = 0
        for entry in entries:
            values = {key.removeprefix("eval/"): value for key, value in entry.items() if key.startswith("eval/")}
            if self.is_metric_of(values):
                has_checkpoint = stored is None or entry["step"] in stored
                self.add(entry["step"], values.get(metric) if has_checkpoint else None)

    def is_metric_of(self, values: Mapping[str, Any]) -> bool:
        """Return True if an evaluation with the metrics `values` measures this metric: an evaluation on held-out data,
        or of the metric's task. `values` may lack the metric itself, as a perplexity that is too large for a float."""
        head = metric_head(self.metric)
        return "loss" in values if head in HELD_OUT_METRICS else any(metric_head(name) == head for name in values)

    def add(self, step: int, value: float | None) -> bool:
        """Add an evaluation after `step` steps, and return True if it is the best; None and NaN are never better."""
        if value is not None and math.isfinite(value) and (self.value is None or self._is_better(value, self.value)):
            self.step, self.value, self.since = step, value, 0
            return True
        self.since += self.step is not None
        return False

    def _is_better(self, value: float, other: float) -> bool:
        return value > other if self.higher else value < other

    def write(self, root: Path) -> None:
        """Write best.json into the folder `root` of the checkpoints, atomically."""
        best = {"step": self.step, "metric": f"eval/{self.metric}", "value": self.value}
        replace_text(root / BEST, json.dumps(best) + "\n")


def best_of_run(out: Path, key: str | None) -> BestSoFar | None:
    """Return the best evaluation by checkpoint.best = `key` of the run in `out`, up to its last checkpoint.

    Return None if `key` is None.
    """
    if key is None:
        return None
    stored = {step_of(folder) for folder in list_complete(checkpoint_root(out))}
    last = max(stored, default=0)
    # Entries of later steps are of a launch that was killed before its save.
    entries = [entry for entry in read_metrics(out / "metrics.jsonl") if entry["step"] <= last]
    return BestSoFar(metric_of(key), entries, stored)


def rewrite_best(out: Path, best: BestSoFar | None) -> None:
    """Make best.json name `best`, or remove the file if no checkpoint is the best.

    The old file may name a step that is trained again, or another metric.
    """
    root = checkpoint_root(out)
    if best is not None and best.step is not None:
        best.write(root)
    else:
        (root / BEST).unlink(missing_ok=True)


def ended_early(out: Path, key: str | None, patience: int) -> int | None:
    """Return the step after which the run in `out` was ended by `patience`; None if it was not."""
    best, last = best_of_run(out, key), latest(checkpoint_root(out))
    return None if best is None or last is None or not 0 < patience <= best.since else step_of(last)


def metric_of(key: str) -> str:
    """Return the metric that the value `key` of checkpoint.best names, without the prefix "eval/"."""
    return key.removeprefix("eval/")


def is_higher_better(metric: str) -> bool:
    """Return True if a higher value of `metric` is better. Raise ConfigError for a metric without a direction."""
    of_task = HIGHER_IS_BETTER.get(metric.rpartition("/")[2])
    if metric_head(metric) not in HELD_OUT_METRICS and of_task is not None:
        return of_task
    for names, higher in ((_HIGHER, True), (_LOWER, False)):
        if any(f"{metric}/".startswith(f"{name}/") for name in names):
            return higher
    raise ConfigError(
        f"checkpoint.best='eval/{metric}' has no direction in which it is better; name a loss, an accuracy, a margin, "
        "or the rewards of chosen replies"
    )


def check_metric(key: str, objective: Objective, sources: Sequence[str], tasks: Sequence[TaskSection] = ()) -> None:
    """Raise ConfigError unless evaluations of `objective` on held-out data of `sources`, or of `tasks`, have the metric
    `key`."""
    names = [f"{task.name}/{name}" for task in tasks for name in METRICS_OF_KIND[task.kind]]
    if metric_of(key) in names:
        return
    if not sources and metric_head(metric_of(key)) in HELD_OUT_METRICS:
        raise ConfigError(
            f"checkpoint.best={key!r} needs held-out data, but the data is so small that its share data.validation is "
            "empty; raise data.validation, add data, or remove checkpoint.best"
        )
    if sources:
        names = [*_held_out_names(objective, sources), *names]
    if metric_of(key) not in names:
        near = get_close_matches(metric_of(key), names, n=1)
        hint = f"did you mean 'eval/{near[0]}'? " if near else ""
        raise ConfigError(
            f"checkpoint.best={key!r} is no metric of this run's evaluations; {hint}the metrics are "
            f"{', '.join(f'eval/{name}' for name in names)}"
        )
    is_higher_better(metric_of(key))


def evaluated_metrics(objective: Objective) -> tuple[str, ...]:
    """Return the names of the metrics that an evaluation of `objective` has beside its loss."""
    if isinstance(objective, SequenceObjective):
        return objective.metrics
    return objective.evaluated if isinstance(objective, LinearObjective) else ()


def _held_out_names(objective: Objective, sources: Sequence[str]) -> list[str]:
    """Return the metrics of an evaluation of `objective` on held-out data of `sources`."""
    names = ["loss", *evaluated_metrics(objective)]
    return names + ([f"{name}/{source}" for name in names for source in sources] if len(sources) > 1 else [])
