"""Write results of evaluations into the model card of an exported folder.

Its text gets a table with standard errors. Its YAML header gets `model-index`, the Hugging Face hub's form of results:
https://github.com/huggingface/hub-docs/blob/main/modelcard.md. In both, the results of other tasks stay.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kumi import __version__
from kumi.convert.hf.card_text import (
    CARD,
    folder_title,
    header_of,
    read_card,
    section_of,
    with_header_key,
    with_section,
    write_card,
)
from kumi.errors import ConfigError
from kumi.evaluation.result_table import metric_direction, metric_figure
from kumi.evaluation.task_result import HARNESS_KIND, TaskResult
from kumi.files.output import refuse_link
from kumi.safe_output import inline_markdown

# The name of the card's section with the table, and the key of its header with the results.
SECTION, KEY = "results of kumi eval", "model-index"
_COLUMNS = ("task", "metric", "better", "n", "value", "standard error", "computed")
_TASK = {"type": "text-generation", "name": "Text Generation"}


def exported_folder(model: str) -> Path:
    """Return the exported folder `model`, whose card can be written. Raise ConfigError or RefusedError for others."""
    folder = Path(model).expanduser()
    if not any((folder / name).is_file() for name in ("config.json", "adapter_config.json")):
        raise ConfigError(
            f"--write-card: {model} is not an exported folder here, with config.json or adapter_config.json; export a "
            "checkpoint with kumi convert, and evaluate that folder"
        )
    refuse_link(folder / CARD)
    text = read_card(folder)
    _with_header(text, folder, [])
    return folder


def write_results(folder: Path, results: Sequence[TaskResult], computed: str, by_harness: str) -> None:
    """Write `results` into the card of `folder`.

    `computed`: how kumi's own tasks were computed, such as the dtype. `by_harness`: the same for tasks of
    lm-evaluation-harness. Raise ConfigError if the card's header cannot be changed.
    """
    text = _with_header(read_card(folder), folder, results)
    old = [cells for line in section_of(text, SECTION).splitlines() if len(cells := _cells(line)) == len(_COLUMNS)]
    names = {inline_markdown(result.name) for result in results}
    # Without the header of the table and the line below it.
    rows = [cells for cells in old[2:] if cells[0] not in names]
    rows += [
        row
        for result in results
        for row in _rows(result, by_harness if result.kind.startswith(HARNESS_KIND) else computed)
    ]
    lines = [_COLUMNS, ("---",) * len(_COLUMNS), *rows]
    table = "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
    write_card(folder, with_section(text, SECTION, f"## Results\n\nMeasured by kumi {__version__}.\n\n{table}"))


def _rows(result: TaskResult, computed: str) -> list[tuple[str, ...]]:
    """Return the cells of a row for each metric of `result`."""
    return [
        (
            inline_markdown(result.name),
            inline_markdown(name),
            metric_direction(name),
            f"{result.count}",
            metric_figure(metric.value, metric.value),
            "" if metric.stderr is None else metric_figure(metric.stderr, metric.value),
            inline_markdown(computed),
        )
        for name, metric in result.metrics.items()
    ]


def _cells(line: str) -> tuple[str, ...]:
    """Return the cells of a line of a table. A bar within a cell is escaped."""
    parts = re.split(r"(?<!\\)\|", line)
    return tuple(part.strip() for part in parts[1:-1])


def _with_header(text: str, folder: Path, results: Sequence[TaskResult]) -> str:
    """Return the card `text` with `results` in its header; without results it is checked and stays as it is."""
    try:
        old = header_of(text).get(KEY)
        index = _with_results(
            [] if old is None else old, folder_title(folder), [_index_entry(each) for each in results]
        )
        changed = with_header_key(text, KEY, index)
    except ConfigError as error:
        raise ConfigError(f"--write-card: {folder}: {error}") from None
    return changed if results else text


def _with_results(old: Any, name: str, new: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Return the model index `old` with the results `new` of the model `name`, in place of those of the same tasks.

    The new results go to the entry of the model `name`, else to the only entry, else to a new one. Raise ConfigError
    unless `old` is a list of models with results.
    """
    models = [model for model in old if isinstance(model, dict)] if isinstance(old, list) else None
    if models is None or len(models) < len(old) or not all(isinstance(model.get("results"), list) for model in models):
        raise ConfigError(f"{CARD}: its {KEY} is not a list of models with results; correct it, or remove it")
    entry = next((model for model in models if model.get("name") == name), models[0] if len(models) == 1 else None)
    others = [] if entry is None else [each for each in entry["results"] if _place(each) not in map(_place, new)]
    changed = {"name": name, **(entry or {}), "results": [*others, *new]}
    return [changed if model is entry else model for model in models] + ([changed] if entry is None else [])


def _place(result: Any) -> Any:
    """Return the task and the data set of a result in a model index. A new result with the same two replaces it."""
    task, dataset = (result.get(key) if isinstance(result, dict) else None for key in ("task", "dataset"))
    kind = task.get("type") if isinstance(task, dict) else None
    return kind, dataset if not isinstance(dataset, dict) else (dataset.get("type"), dataset.get("name"))


def _index_entry(result: TaskResult) -> dict[str, Any]:
    """Return `result` in the form of a model index, without values that are not finite."""
    finite = {name: metric.value for name, metric in result.metrics.items() if math.isfinite(metric.value)}
    return {
        "task": dict(_TASK),
        "dataset": {"type": re.sub(r"[^\w./-]+", "-", result.name), "name": result.name},
        # Six digits are more than any standard error leaves certain.
        "metrics": [{"type": name, "value": float(f"{value:.6g}"), "name": name} for name, value in finite.items()],
    }
