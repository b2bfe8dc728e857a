"""The best evaluation of a run by one of its metrics: which checkpoint to keep, and when to stop early.

The evaluations in metrics.jsonl decide, so that a resumed run goes on with what it knew. Lower is better for losses,
"kl" and "entropy"; higher for accuracies, margins, rewards of chosen replies and log-probs of them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kumi.errors import ConfigError
from kumi.files.output import write_text
from kumi.files.untrusted import read_object
from kumi.objectives import LinearObjective, Objective, SequenceObjective
from kumi.train.metrics import read_metrics

BEST = "best.json"
_LOWER, _HIGHER = ("loss", "kl", "entropy"), ("accuracies", "accuracy", "margins", "chosen")


class BestSoFar:
    """The best value of `metric` among the evaluations of a run so far.

    `step`, `value`: of the best evaluation; None before the first.
    `since`: evaluations after it.
    """

    def __init__(self, metric: str, entries: Iterable[Mapping[str, Any]] = ()) -> None:
        self.metric, self.higher = metric, is_higher_better(metric)
        self.step: int | None = None
        self.value: float | None = None
        self.since = 0
        for entry in entries:
            if isinstance(value := entry.get(f"eval/{metric}"), int | float):
                self.add(int(entry["step"]), float(value))

    def add(self, step: int, value: float | None) -> bool:
        """Add an evaluation after `step` steps, and return True if it is the best; None is never better."""
        if value is not None and (self.value is None or (value > self.value if self.higher else value < self.value)):
            self.step, self.value, self.since = step, value, 0
            return True
        self.since += 1
        return False

    def write(self, root: Path) -> None:
        """Write best.json into the folder `root` of the checkpoints, atomically."""
        part = root / f"{BEST}.part"
        write_text(part, json.dumps({"step": self.step, "metric": f"eval/{self.metric}", "value": self.value}) + "\n")
        os.replace(part, root / BEST)


def read_best(root: Path) -> dict[str, Any] | None:
    """Return the content of best.json in the folder `root` of the checkpoints; None without one."""
    return read_object(root, BEST) if (root / BEST).exists() else None


def metric_of(key: str) -> str:
    """Return the metric that the value `key` of checkpoint.best names, without the prefix "eval/"."""
    return key.removeprefix("eval/")


def is_higher_better(metric: str) -> bool:
    """Return True if a higher value of `metric` is better. Raise ConfigError for a metric without a direction."""
    words = {part for name in metric.split("/") for part in name.split("_")}
    if words & set(_HIGHER):
        return True
    if words & set(_LOWER):
        return False
    raise ConfigError(
        f"checkpoint.best='eval/{metric}' has no direction in which it is better; name a loss, an accuracy, a margin, "
        "or the rewards of chosen replies"
    )


def check_metric(key: str, objective: Objective, sources: Sequence[str]) -> None:
    """Raise ConfigError unless an evaluation of `objective` on held-out data of `sources` has the metric `key`."""
    own: tuple[str, ...] = ()
    if isinstance(objective, SequenceObjective):
        own = objective.metrics
    elif isinstance(objective, LinearObjective):
        own = objective.evaluated
    names = ["loss", *own]
    names += [f"{name}/{source}" for name in names for source in sources] if len(sources) > 1 else []
    if metric_of(key) not in names:
        raise ConfigError(
            f"checkpoint.best={key!r} is no metric of this run's evaluations; they have "
            f"{', '.join(f'eval/{name}' for name in names)}"
        )
    is_higher_better(metric_of(key))


def ended_early(out: Path, best: str | None, patience: int) -> int | None:
    """Return the step after which the run in `out` was ended by `patience`; None if it was not."""
    if best is None or not patience:
        return None
    so_far = BestSoFar(metric_of(best))
    for entry in read_metrics(out / "metrics.jsonl"):
        value = entry.get(f"eval/{so_far.metric}")
        if "eval/loss" in entry and not so_far.add(entry["step"], value) and so_far.since >= patience:
            return int(entry["step"])
    return None
