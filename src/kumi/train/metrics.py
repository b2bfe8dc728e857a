"""Report the metrics of a run: lines or a progress bar in the terminal, metrics.jsonl, trackers.

Keys of a step: step, tokens, layout (text with the fields that differ from their defaults), train/loss,
train/grad_norm, train/lr, perf/tokens_per_s, perf/mfu, perf/step_s, perf/estimated_step_s, time/data_s, mem/peak_bytes,
mem/estimated_bytes. With routed experts: train/aux_loss (not included in train/loss), train/busiest_expert (its tokens
relative to the mean of its layer). In float16 runs: train/skipped_updates (in the run so far), train/loss_scale. Keys
of an evaluation: eval/loss, eval/tokens, eval/unigram_entropy (of language modelling), and eval/loss/<source> for each
of several sources. Metrics of the objective (`kumi.objectives`) stand under train/ and eval/, such as
train/rewards/margins and eval/rewards/accuracies/<source>. Keys of an evaluation of tasks: eval/<task>/<metric>, with
its standard error eval/<task>/<metric>_stderr, and time/tasks_s. On a GPU, a step also has mem/reserved_bytes and
mem/free_bytes; with rollouts, the keys of `kumi.rollout.rollout_metrics` and `kumi.train.refined_estimates`; with a
critic, critic/loss and others of critic/.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from kumi.files.json_lines import json_objects
from kumi.files.output import open_append, replace_text
from kumi.safe_output import without_secrets
from kumi.train.step_lines import step_line
from kumi.units import format_count, format_seconds

# (metrics, step): sends the metrics of a step to a service or a file of its own.
Tracker = Callable[[dict[str, Any], int], None]


def read_metrics(file: Path) -> list[dict[str, Any]]:
    """Return the entries of a metrics.jsonl, without broken lines; [] if the file does not exist."""
    return [entry for entry in json_objects(file) if isinstance(entry.get("step"), int)]


def truncate_metrics(file: Path, step: int) -> None:
    """Remove from `file` the entries after `step`, because these steps will be trained again, and broken lines."""
    if not file.exists():
        return
    lines = [json.dumps(entry) + "\n" for entry in read_metrics(file) if entry["step"] <= step]
    replace_text(file, "".join(lines))


class Metrics:
    """The metrics of a run on rank 0. A tracker that fails is reported once and then ignored."""

    def __init__(
        self, out: Path, *, name: str, steps: int, first_step: int, every: int, trackers: tuple[str, ...]
    ) -> None:
        self.steps, self.every = steps, every
        self._first = first_step
        self._timed_from: tuple[int, float] | None = None
        self._file: IO[str] = open_append(out / "metrics.jsonl")
        self._trackers: dict[str, Tracker] = {}
        for kind in trackers:
            self._start_tracker(kind, out, name)
        self._bar = _Bar(steps, first_step) if sys.stdout.isatty() else None

    def step(self, entry: dict[str, Any], busy: str = "") -> None:
        """Record the entry of one training step. `busy`: the note of `kumi.train.cpu_contention`, or ""."""
        self._write(entry)
        step = entry["step"]
        time_left = self._time_left(step)
        if self._bar is not None:
            speed = format_count(entry["perf/tokens_per_s"])
            self._bar.update(step, f"loss {entry['train/loss']:.3f}, {speed} tok/s, {time_left} left")
        if step % self.every == 0 or step in (self._first + 1, self.steps):
            self.note(step_line(entry, self.steps, time_left, busy))

    def note(self, text: str, entry: dict[str, Any] | None = None) -> None:
        """Print `text` and, if given, record `entry`."""
        if entry is not None:
            self._write(entry)
        if self._bar is not None:
            self._bar.print(text)
        else:
            print(text, flush=True)

    def close(self) -> None:
        """Close metrics.jsonl and end the progress bar."""
        with suppress(OSError):  # a full disk was reported when the entry was written
            self._file.close()
        if self._bar is not None:
            self._bar.close()

    def _time_left(self, step: int) -> str:
        """Estimate the remaining time; "..." before the second step.

        The first step is not counted, because it includes the preflight check.
        """
        if self._timed_from is None or step == self._timed_from[0]:
            self._timed_from = self._timed_from or (step, time.monotonic())
            return "..."
        first_step, started = self._timed_from
        return format_seconds((time.monotonic() - started) / (step - first_step) * (self.steps - step))

    def _write(self, entry: dict[str, Any]) -> None:
        """Append `entry` to metrics.jsonl, and send its numbers to the trackers."""
        # The gradient norm of a skipped float16 step is not finite, and JSON has no such numbers.
        finite = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in entry.items()
        }
        self._file.write(json.dumps(finite, allow_nan=False) + "\n")
        self._file.flush()
        for kind, send in list(self._trackers.items()):
            try:
                send({key: value for key, value in entry.items() if isinstance(value, int | float)}, entry["step"])
            except Exception as error:  # no error of a tracker may stop the run
                del self._trackers[kind]
                print(
                    f"{kind}: failed, so metrics are no longer sent there: {without_secrets(str(error))}",
                    file=sys.stderr,
                    flush=True,
                )

    def _start_tracker(self, kind: str, out: Path, name: str) -> None:
        """Start the tracker `kind`, or print why it cannot be started."""
        try:
            self._trackers[kind] = _TRACKERS[kind](out, name)
        except Exception as error:
            print(
                f"{kind}: cannot be started, so metrics are not sent there: {without_secrets(str(error))}",
                file=sys.stderr,
                flush=True,
            )


class _Bar:
    """A progress bar with the metrics of the last step."""

    def __init__(self, steps: int, first_step: int) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self._progress = Progress(
            TextColumn("step"), MofNCompleteColumn(), BarColumn(bar_width=20), TextColumn("{task.fields[line]}")
        )
        self._task = self._progress.add_task("", total=steps, completed=first_step, line="")
        self._progress.start()

    def update(self, step: int, line: str) -> None:
        self._progress.update(self._task, completed=step, line=line)

    def print(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        self._progress.stop()


def _tensorboard(out: Path, name: str) -> Tracker:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(out / "tensorboard"))

    def send(values: dict[str, Any], step: int) -> None:
        summary = Summary(value=[Summary.Value(tag=key, simple_value=float(value)) for key, value in values.items()])
        writer.add_event(Event(wall_time=time.time(), step=step, summary=summary))
        writer.flush()

    return send


def _wandb(out: Path, name: str) -> Tracker:
    import wandb

    run = wandb.init(project="kumi", name=name, dir=str(out), resume="allow", id=f"{name}-{out.resolve().name}")
    return lambda values, step: run.log(values, step=step)


def _mlflow(out: Path, name: str) -> Tracker:
    import mlflow

    mlflow.start_run(run_name=name)
    return lambda values, step: mlflow.log_metrics({key: float(value) for key, value in values.items()}, step=step)


def _trackio(out: Path, name: str) -> Tracker:
    import trackio

    run = trackio.init(project="kumi", name=name)
    return lambda values, step: run.log(values, step=step)


# Kind of tracker -> the function of the run folder and the run's name that starts it.
_TRACKERS: dict[str, Callable[[Path, str], Tracker]] = {
    "tensorboard": _tensorboard,
    "wandb": _wandb,
    "mlflow": _mlflow,
    "trackio": _trackio,
}
