"""The facts of a run in the model card of its export: how the model was trained, and how it was evaluated meanwhile."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kumi.config import RunConfig
from kumi.convert.hf.card import CardContents
from kumi.convert.hf.origin import Origin
from kumi.data import Store
from kumi.evaluation.task_result import METRICS_OF_KIND
from kumi.objectives import Objective
from kumi.safe_output import inline_markdown
from kumi.spec.precision import Precision
from kumi.train.best_checkpoint import BestSoFar, best_of_run, evaluated_metrics, metric_of
from kumi.train.metrics import read_metrics


def run_card(
    config: RunConfig, out: Path, step: int, *, origin: Origin, precision: Precision | None, store: Store | None
) -> CardContents:
    """Return the contents of the card of an export of the checkpoint after `step` steps of the run in the folder `out`.

    `precision`, `store`: of the run; None if they are not known any more, and the card then lacks their facts.
    """
    objective = config.objective
    data = () if config.data is None else config.data.sources
    facts = {
        "made by": f"kumi train, {objective.words} with {config.optim.kind}, learning rate {config.optim.lr:g}",
        "trained on": ", ".join(dict.fromkeys(Path(source.path).name for source in data)),
        "training tokens": f"{step * config.batch.tokens_per_step:,}",
        "steps": f"{step:,}",
        "sequence length": f"{config.batch.seq_len:,}",
    }
    if precision is not None:
        facts["precision"] = f"{precision.compute} compute, {precision.param} weights"
    if store is not None:
        facts["documents"] = f"{store.documents:,}"
        if objective.kind == "lm":
            facts["unigram entropy (nats a token)"] = f"{store.unigram_entropy:.4f}"
    return CardContents(
        name=config.name,
        facts=facts,
        origin=origin,
        license=config.export.license,
        datasets=config.export.datasets,
        evaluation="\n\n".join([_evaluation(config, out, step), *_tasks(config, out, step)]),
    )


def _evaluation(config: RunConfig, out: Path, step: int) -> str:
    """Return the Markdown of the last evaluation up to `step`, and the step of the best one."""
    entries = [entry for entry in read_metrics(out / "metrics.jsonl") if "eval/loss" in entry and entry["step"] <= step]
    if not entries:
        return "The run did not evaluate the model on held-out data."
    entry, objective = entries[-1], config.objective.build()
    which = "" if entry["step"] == step else ", the last evaluation before this checkpoint"
    first = f"After step {entry['step']:,}{which}, on held-out data"
    first += f" of {entry['eval/tokens']:,} tokens." if isinstance(entry.get("eval/tokens"), int) else "."
    return "\n".join([first, *_best_line(config, out, entry["step"]), "", *_table(entry, objective)])


def _tasks(config: RunConfig, out: Path, step: int) -> list[str]:
    """Return the Markdown of the last results of the run's tasks up to `step`; [] without results."""
    names = [(task.name, metric) for task in config.eval.tasks for metric in METRICS_OF_KIND[task.kind]]
    entries = [
        entry
        for entry in read_metrics(out / "metrics.jsonl")
        if entry["step"] <= step and any(f"eval/{task}/{metric}" in entry for task, metric in names)
    ]
    if not entries:
        return []
    entry, rows = entries[-1], [["task", "metric", "value", "standard error"], ["---"] * 4]
    for task, metric in names:
        key = f"eval/{task}/{metric}"
        if key in entry:
            rows.append([inline_markdown(task), metric, _figure(entry[key]), _figure(entry.get(f"{key}_stderr"))])
    table = [f"| {' | '.join(cells)} |" for cells in rows]
    return ["\n".join([f"Tasks, after step {entry['step']:,}:", "", *table])]


def _best_line(config: RunConfig, out: Path, step: int) -> list[str]:
    """Return a sentence on the best evaluation of the run by checkpoint.best; [] without that key."""
    key = config.checkpoint.best
    best: BestSoFar | None = best_of_run(out, key)
    if key is None or best is None or best.step is None or best.value is None:
        return []
    metric = inline_markdown(f"eval/{metric_of(key)}")
    if best.step == step:
        return [f"It is the best evaluation of the run by {metric}."]
    return [f"The best evaluation of the run by {metric} was {best.value:.4f}, after step {best.step:,}."]


def _table(entry: Mapping[str, Any], objective: Objective) -> list[str]:
    """Return a table with a row for all held-out data and one for each of several sources."""
    by_tokens = objective.unit == "tokens"
    names = ("loss", *evaluated_metrics(objective))
    columns = [f"loss ({'nats a token' if by_tokens else f'mean of {objective.unit}'})"]
    columns += ["perplexity"] if by_tokens else []
    columns += names[1:]
    rows = [_cells(entry, names, "", by_tokens)]
    prefix = "eval/loss/"
    sources = [key.removeprefix(prefix) for key in entry if key.startswith(prefix)]
    rows += [[inline_markdown(source), *_cells(entry, names, f"/{source}", by_tokens)[1:]] for source in sources]
    lines = [["data", *columns], ["---"] * (len(columns) + 1), *rows]
    return [f"| {' | '.join(cells)} |" for cells in lines]


def _cells(entry: Mapping[str, Any], names: Sequence[str], suffix: str, by_tokens: bool) -> list[str]:
    """Return the cells of a row: the metrics `names` of `entry` under the keys eval/<name><suffix>."""
    values = [entry.get(f"eval/{name}{suffix}") for name in names]
    cells = [_figure(value) for value in values]
    if by_tokens:
        loss = values[0]
        # exp(700) is close to the largest float.
        cells.insert(1, _figure(math.exp(loss) if isinstance(loss, int | float) and loss < 700 else None))
    return ["all", *cells]


def _figure(value: Any) -> str:
    if not isinstance(value, int | float) or not math.isfinite(value):
        return "-"
    return f"{value:.4f}" if abs(value) < 1e4 else f"{value:.4g}"
