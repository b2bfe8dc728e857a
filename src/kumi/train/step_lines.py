"""The lines that a run prints: a legend, then one line of at most WIDTH characters for each step that is shown.

    step 40/400  loss 5.8843  lr 2.0e-03  norm 0.65  3.97k tok/s  258/241 ms  MFU 41.2%  912/870 MiB  eta 2m05s

`258/241 ms` is the measured and the estimated time of the step, `912/870 MiB` the measured and the estimated peak
memory. If not all figures fit, figures that can be computed from others are left out first; metrics.jsonl has all.

A step with rollouts has `reward 0.412` and `rollout 3.1/2.9+0.2+0.4/0.4 s` where it begins a batch: the mean reward,
and the measured and the estimated seconds of generation, of scoring (estimated for reward models only) and of the
trainer's log-probs. Estimates are those of `kumi.rollout.rollout_estimates`, refined by the steps before
(`kumi.train.refined_estimates`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kumi.evaluation.task_result import TaskResult
from kumi.units import format_bytes, format_count, format_seconds

WIDTH = 100
# The key of the validation loss; the loss on one source has this key, a slash and the source's name.
EVAL_LOSS = "eval/loss"
_GAP = "  "
# Characters of a line that are left free for the words before the losses of sources.
_INDENT = 30

# Figures are added to a line in this order of priority, and printed in the order of `_figures`.
_PRIORITY = (
    "step",
    "loss",
    "reward",
    "time",
    "rollout",
    "skipped",
    "busy",
    "memory",
    "eta",
    "norm",
    "tokens",
    "lr",
    "mfu",
    "accuracy",
)

_BYTE_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def legend(*, on_cpu: bool, step_s: float | None, memory: int, mfu: bool, rollouts: bool = False) -> list[str]:
    """Return the lines that explain the step lines.

    `step_s` and `memory` (bytes) are estimates; `step_s` is None if the device's speed is not known. `mfu`: step lines
    have the model FLOPs utilisation, because the device's peak FLOPs are known. `rollouts`: the run has rollouts.
    """
    counted = "the growth of the process" if on_cpu else "allocated bytes"
    time = "measured; the device's speed is not known"
    if step_s is not None:
        time = f"measured/estimated ({_seconds(step_s)})"
    lines = [f"time       of a step, {time}"]
    if rollouts:
        estimates = "; estimates are for the lengths of the batch before" if step_s is not None else ""
        lines.append(f"rollout    generation + rewards + log-probs{estimates}")
    lines.append(f"peak       of rank 0's memory, measured/estimated ({format_bytes(memory)}): {counted}")
    return lines if mfu or rollouts else [*lines, "MFU        not known, because the device's peak FLOPs are not known"]


def step_line(entry: dict[str, Any], steps: int, time_left: str, busy: str = "") -> str:
    """Return the line for the metrics `entry` of a step out of `steps`, at most WIDTH characters long.

    `busy`: the note of `kumi.train.cpu_contention` on a slow step, or "".
    """
    figures = {"step": f"step {entry['step']}/{steps}", **_figures(entry), "busy": busy, "eta": f"eta {time_left}"}
    shown, room = set(), WIDTH + len(_GAP)
    for name in _PRIORITY:
        length = len(figures[name]) + len(_GAP)
        if figures[name] and length <= room:
            shown.add(name)
            room -= length
    return _GAP.join(text for name, text in figures.items() if name in shown)


def source_losses(entry: dict[str, Any]) -> list[str]:
    """Return the validation losses of sources in the metrics `entry` of an evaluation, several in a line."""
    prefix = f"{EVAL_LOSS}/"
    losses = {key.removeprefix(prefix): loss for key, loss in entry.items() if key.startswith(prefix)}
    return metric_lines({name: loss for name, loss in losses.items() if loss is not None})


def metric_lines(metrics: Mapping[str, float]) -> list[str]:
    """Return the metrics of an evaluation with their names, several in a line."""
    return _filled([f"{name} {decimals(value, 4)}" for name, value in metrics.items()])


def task_lines(results: Sequence[TaskResult]) -> list[str]:
    """Return the metrics of tasks with their standard errors, several in a line, after the name of their task."""
    return [f"{result.name}: {line}" for result in results for line in _filled(_metric_texts(result))]


def _metric_texts(result: TaskResult) -> list[str]:
    """Return the text of each metric with its standard error."""
    return [
        f"{name} {decimals(metric.value, 4)}" + ("" if metric.stderr is None else f" ± {decimals(metric.stderr, 4)}")
        for name, metric in result.metrics.items()
    ]


def _filled(texts: Sequence[str]) -> list[str]:
    """Return `texts` in as few lines as have room for them."""
    lines = [""]
    for text in texts:
        if lines[-1] and len(lines[-1]) + len(_GAP) + len(text) > WIDTH - _INDENT:
            lines.append("")
        lines[-1] += f"{_GAP if lines[-1] else ''}{text}"
    return [line for line in lines if line]


def _figures(entry: dict[str, Any]) -> dict[str, str]:
    """Return the figures of a step in the order of a line; "" for a figure that the step does not have."""
    mfu, skipped = entry["perf/mfu"], entry.get("train/skipped_updates", 0)
    accuracy, reward = entry.get("train/rewards/accuracies"), entry.get("rollout/reward")
    names = ("generate", "score", "log_probs")
    parts = [(entry.get(f"time/{name}_s"), entry.get(f"time/estimated_{name}_s")) for name in names]
    return {
        "reward": "" if reward is None else f"reward {decimals(reward, 3)}",
        "loss": f"loss {decimals(entry['train/loss'], 4)}",
        "lr": f"lr {entry['train/lr']:.1e}",
        "norm": f"norm {decimals(entry['train/grad_norm'], 2)}",
        "skipped": f"skipped {format_count(skipped)}" if skipped else "",
        "tokens": f"{format_count(entry['perf/tokens_per_s'])} tok/s",
        "time": _pair_of_seconds(entry["perf/step_s"], entry["perf/estimated_step_s"]),
        "rollout": "" if parts[0][0] is None else f"rollout {_part_seconds(parts)}",
        "mfu": "" if mfu is None else f"MFU {100 * mfu:.1f}%",
        "accuracy": "" if accuracy is None else f"accuracy {100 * accuracy:.0f}%",
        "memory": _pair_of_bytes(entry["mem/peak_bytes"], entry["mem/estimated_bytes"]),
    }


def decimals(value: float, places: int) -> str:
    """Format `value` with `places` decimals; from 1000 on with 3 significant digits."""
    return f"{value:.{places}f}" if abs(value) < 1000 else f"{value:.3g}"


def _pair_of_seconds(measured: float, estimated: float | None) -> str:
    """Format measured/estimated seconds, in the unit that suits the measured value."""
    unit, scale = ("s", 1) if measured >= 1 else ("ms", 1000)
    return f"{scale * measured:.3g}{'' if estimated is None else f'/{scale * estimated:.3g}'} {unit}"


def _part_seconds(parts: Sequence[tuple[Any, float | None]]) -> str:
    """Format the measured and estimated seconds of the parts of a rollout, in the unit that suits the measured sum."""
    unit, scale = ("s", 1) if sum(measured for measured, _ in parts) >= 1 else ("ms", 1000)
    texts = [
        f"{_short(scale * measured)}{'' if estimated is None else f'/{_short(scale * estimated)}'}"
        for measured, estimated in parts
    ]
    return f"{'+'.join(texts)} {unit}"


def _pair_of_bytes(measured: float, estimated: float) -> str:
    """Format measured/estimated bytes, in the unit that suits the measured value."""
    unit = format_bytes(measured).split()[1]
    size = _BYTE_UNITS[unit]
    return f"{_short(measured / size)}/{_short(estimated / size)} {unit}"


def _short(value: float) -> str:
    """Format `value` with 3 significant digits, and without an exponent up to 1024, where the unit changes."""
    return f"{value:.0f}" if 1000 <= value < 1024 else f"{value:.3g}"


def _seconds(value: float) -> str:
    if value >= 1000:
        return format_seconds(value)
    return f"{value:.3g} s" if value >= 1 else f"{1000 * value:.3g} ms"
