"""The result of a run, as a TrainOutput and as lines for the terminal, with commands to continue with."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any

from kumi.config import ResolvedRun, RunConfig
from kumi.config.run_length import run_steps
from kumi.errors import OK
from kumi.evaluation.task_result import METRICS_OF_KIND
from kumi.remote.cache_folder import local_run_folder
from kumi.storage.folders import latest, step_of
from kumi.train.best_checkpoint import best_of_run, ended_early
from kumi.train.measured_steps import estimate_lines
from kumi.train.metrics import read_metrics
from kumi.train.step_lines import decimals, source_losses
from kumi.units import format_count, format_seconds


@dataclass(frozen=True)
class TrainOutput:
    """The result of a training run, from the files in its run folder. Losses are means over the units
    of the objective: nats per token for language modelling."""

    global_step: int  # updates that are done and saved
    max_steps: int  # 0 if it follows from prepared data that is gone
    num_input_tokens_seen: int  # tokens of all steps so far
    train_runtime: float  # seconds of all steps, over all launches of the run
    training_loss: float | None  # mean loss of the steps in metrics.jsonl; None without any
    train_losses: tuple[float, float] | None  # first and last training loss in metrics.jsonl
    eval_losses: tuple[float, float] | None  # first and last evaluation loss in metrics.jsonl
    metrics: dict[str, Any]  # the last value of each key in metrics.jsonl
    output_dir: Path  # the run folder
    checkpoint: Path | None  # the last complete checkpoint
    model_dir: Path | None  # the Hugging Face folder, or the adapters; None if nothing is exported

    @property
    def stopped(self) -> bool:
        """True if the run ended before its last step; the same call resumes it."""
        return self.global_step < self.max_steps


def train_output(config: RunConfig, code: int = OK) -> TrainOutput:
    """Return the result of the run of `config`, which ended with the exit `code`, from the files in its folder."""
    out = local_run_folder(config.train.out)
    entries = read_metrics(out / "metrics.jsonl")
    steps = [entry for entry in entries if "train/loss" in entry]
    losses = _values(steps, "train/loss")
    checkpoint = latest(out / "checkpoints")
    step = 0 if checkpoint is None else step_of(checkpoint)
    model = out / ("hf" if config.lora is None else "adapter")
    ended = ended_early(out, config.checkpoint.best, config.train.patience)
    max_steps = (run_steps(config) or 0) if ended is None else ended
    exported = code == OK and config.export.enabled and step >= max_steps and model.is_dir()
    return TrainOutput(
        global_step=step,
        max_steps=max_steps,
        num_input_tokens_seen=steps[-1]["tokens"] if steps else 0,
        train_runtime=sum(_values(steps, "perf/step_s")),
        training_loss=sum(losses) / len(losses) if losses else None,
        train_losses=_first_and_last(losses),
        eval_losses=_first_and_last(_values(entries, "eval/loss")),
        metrics={key: value for entry in entries for key, value in entry.items()},
        output_dir=out,
        checkpoint=checkpoint,
        model_dir=model if exported else None,
    )


def _values(entries: list[dict[str, Any]], key: str) -> list[float]:
    return [entry[key] for entry in entries if entry.get(key) is not None]


def _first_and_last(values: list[float]) -> tuple[float, float] | None:
    return (values[0], values[-1]) if values else None


def summary_lines(run: ResolvedRun, code: int = OK, *, already_finished: bool = False) -> list[str]:
    """Return the lines that the terminal shows after `run` ended with the exit `code`.

    `already_finished`: an earlier launch did all steps.
    """
    output = train_output(run.config, code)
    status = "interrupted" if code != OK else "already finished" if already_finished else "finished"
    steps = f"{output.global_step} of {output.max_steps}" if code != OK else f"{output.global_step}"
    tokens, seconds = format_count(output.num_input_tokens_seen), format_seconds(output.train_runtime)
    parts = [f"{status}: {steps} steps, {tokens} tokens, {seconds} of training"]
    losses = [
        f"{word} loss {ends[0]:.4f} -> {ends[1]:.4f}"
        for word, ends in (("train", output.train_losses), ("validation", output.eval_losses))
        if ends is not None
    ]
    parts += [", ".join(losses)] if losses else []
    parts += [f"validation loss on {line}" for line in source_losses(output.metrics)]
    parts += list(_task_lines(run))
    best = best_of_run(run.out, run.config.checkpoint.best)
    if best is not None and best.value is not None:
        parts.append(f"best eval/{best.metric} {best.value:.4f}, with the checkpoint of step {best.step}")
    folders = {"model": output.model_dir, "checkpoint": output.checkpoint}
    parts += [f"{word} in {folder}" for word, folder in folders.items() if folder is not None]
    return [
        *_labelled("summary", parts),
        *_labelled("estimate", list(estimate_lines(run))),
        *_labelled("next", list(next_commands(run, output, code))),
    ]


def _task_lines(run: ResolvedRun) -> Iterator[str]:
    """Yield a line for each task of `run` that was evaluated: the first and the last value of each metric."""
    entries = read_metrics(run.out / "metrics.jsonl")
    for task in run.config.eval.tasks:
        names = METRICS_OF_KIND[task.kind]
        ends = {name: _first_and_last(_values(entries, f"eval/{task.name}/{name}")) for name in names}
        texts = [
            f"{name} {' -> '.join(decimals(value, 4) for value in values)}"
            for name, values in ends.items()
            if values is not None
        ]
        if texts:
            yield f"task {task.name}: {', '.join(texts)}"


def _labelled(label: str, parts: list[str]) -> list[str]:
    return [f"{label if index == 0 else '':<11}{part}" for index, part in enumerate(parts)]


def next_commands(run: ResolvedRun, output: TrainOutput, code: int = OK) -> Iterator[str]:
    """Yield up to three shell commands with which a user may continue after `run`.

    Paths in the commands are relative to the folder in which the run was launched.
    """
    file = shlex.quote(str(run.out / "config.toml"))
    one_node = run.cluster.nodes == 1  # with more nodes, only the user knows the launcher's command
    if code != OK or output.checkpoint is None:
        if one_node:
            yield f"kumi train {file}"
        yield f"kumi describe {file}"
        yield f"kumi data inspect {file}"
        return
    source = output.checkpoint if run.model.lora is None else run.out / "adapter"
    best = best_of_run(run.out, run.config.checkpoint.best)
    if best is not None and best.step is not None and best.step < output.global_step:
        exported = shlex.quote(str(_free_name(run.out / "best")))
        yield f"kumi convert {shlex.quote(str(run.out))} {exported} --checkpoint best"
    elif source.is_dir():
        target = _free_name(run.out / ("bfloat16" if run.model.lora is None else "merged"))
        dtype_option = " --dtype bfloat16" if run.model.lora is None else ""
        yield f"kumi convert {shlex.quote(str(source))} {shlex.quote(str(target))} --to hf{dtype_option}"
    if one_node and ended_early(run.out, run.config.checkpoint.best, run.config.train.patience) is not None:
        yield f"kumi train {file} train.patience=0 --allow-change train.patience"
    elif one_node:
        key, length = ("steps", run.steps) if run.config.train.epochs is None else ("epochs", run.config.train.epochs)
        yield f"kumi train {file} train.{key}={2 * length} --allow-change train.{key}"
    else:
        yield f"kumi data inspect {file}"
    if output.model_dir is not None and run.model.lora is None and run.model.head == "lm":
        prompts, model = run.config.sample.prompts, shlex.quote(str(output.model_dir))
        if isinstance(prompts, str):
            yield f"kumi generate {model} --prompts {shlex.quote(prompts)} --out replies.jsonl"
        else:
            yield f"kumi generate {model} --prompt {shlex.quote(next(iter(prompts), 'hello'))}"
    else:
        yield f"kumi describe {file}"


def _free_name(folder: Path) -> Path:
    """Return `folder`, or if it exists the first free name of folder-2, folder-3, ..."""
    names = chain([folder], (folder.with_name(f"{folder.name}-{number}") for number in count(2)))
    return next(name for name in names if not os.path.lexists(name))
