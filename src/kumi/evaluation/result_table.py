"""Results of evaluations as a table, models side by side, and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kumi.evaluation.task_result import HIGHER_IS_BETTER, Metric, TaskResult

if TYPE_CHECKING:
    from rich.table import Table


def result_table(models: Sequence[str], results: Sequence[Sequence[TaskResult]]) -> Table:
    """Return a table with a row for each metric of each task, and a column for each model.

    results: those of each of `models`, for the same tasks in the same order.
    """
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for name in ("task", "metric", "", "n"):
        table.add_column(name, justify="right" if name == "n" else "left")
    for model in models:
        table.add_column(Text(model, overflow="fold"), justify="right")
    for of_task in zip(*results, strict=True):
        names = dict.fromkeys(name for result in of_task for name in result.metrics)
        for row, name in enumerate(names):
            first = of_task[0] if row == 0 else None
            task, count = ("", "") if first is None else (first.name, str(first.count))
            cells = [_cell(result.metrics.get(name)) for result in of_task]
            # Names come from files: rich would read brackets in them as markup.
            table.add_row(*map(Text, (task, name, metric_direction(name), count, *cells)))
    return table


def metric_direction(metric: str) -> str:
    """Return "higher" or "lower", whichever value of `metric` is better; "" if that is not known."""
    better = HIGHER_IS_BETTER.get(metric)
    return "" if better is None else "higher" if better else "lower"


def _cell(metric: Metric | None) -> str:
    """Return the value of a metric, with its standard error if it has one."""
    if metric is None:
        return "-"
    value = metric_figure(metric.value, metric.value)
    return value if metric.stderr is None else f"{value} ± {metric_figure(metric.stderr, metric.value)}"


def metric_figure(number: float, value: float) -> str:
    """Return `number`, the value or the error of a metric, with the digits that a table shows for this `value`."""
    return f"{number:.4f}" if abs(value) < 1e4 else f"{number:.4g}"


def plain_results(results: Sequence[TaskResult]) -> dict[str, Any]:
    """Return `results` by task, as JSON has them."""
    return {
        result.name: {"kind": result.kind, "count": result.count, "metrics": plain_metrics(result.metrics)}
        for result in results
    }


def plain_metrics(metrics: Mapping[str, Metric]) -> dict[str, dict[str, float | None]]:
    """Return `metrics` by name, each as a dict of its value and standard error."""
    return {name: {"value": metric.value, "stderr": metric.stderr} for name, metric in metrics.items()}


def results_from_plain(plain: Mapping[str, Any]) -> list[TaskResult]:
    """Return the results that `plain_results` wrote."""
    return [
        TaskResult(
            name,
            result["kind"],
            result["count"],
            {metric: Metric(each["value"], each["stderr"]) for metric, each in result["metrics"].items()},
        )
        for name, result in plain.items()
    ]
