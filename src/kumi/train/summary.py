"""How a run ended, in figures and in words, with commands that can follow."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator
from itertools import chain, count
from pathlib import Path
from typing import Any

from kumi.config import Run
from kumi.errors import OK
from kumi.storage.folders import latest, step_of
from kumi.train.metrics import read_metrics
from kumi.units import format_count, format_seconds


def summary(run: Run, code: int = OK, *, anew: bool = True) -> dict[str, Any]:
    """Return how `run` stands after it ended with the exit `code`, as plain data for people and for JSON.

    `anew` is False where this start had nothing left to train. `seconds` is the time of all steps, over all starts of
    the run. Losses are nats a token, [first, last] of the run, None where none was measured. `model` is the folder of
    the exported model or adapters, None where there is none.
    """
    entries = read_metrics(run.out / "metrics.jsonl")
    steps = [entry for entry in entries if "train/loss" in entry]
    saved = latest(run.out / "checkpoints")
    model = run.out / ("adapter" if run.model.lora is not None else "hf")
    exported = model if code == OK and run.config.export.enabled and model.is_dir() else None
    return {
        "name": run.config.name,
        "status": "interrupted" if code != OK else "finished" if anew else "already finished",
        "steps": 0 if saved is None else step_of(saved),
        "of_steps": run.config.train.steps,
        "tokens": steps[-1]["tokens"] if steps else 0,
        "seconds": sum(entry.get("perf/step_s") or 0.0 for entry in steps),
        "train_loss": _ends(entries, "train/loss"),
        "validation_loss": _ends(entries, "eval/loss"),
        "checkpoint": None if saved is None else str(saved),
        "model": None if exported is None else str(exported),
        "next": list(_next(run, code, saved, exported)),
    }


def _ends(entries: list[dict[str, Any]], key: str) -> list[float] | None:
    """The first and the last value of `key` in a run's metrics."""
    values = [entry[key] for entry in entries if entry.get(key) is not None]
    return [values[0], values[-1]] if values else None


def _next(run: Run, code: int, saved: Path | None, exported: Path | None) -> Iterator[str]:
    """Commands that work after `run`, from the folder that it was started in, on one machine."""
    file = shlex.quote(str(run.out / "config.toml"))
    alone = run.cluster.nodes == 1  # else a launcher has to start the ranks, in a way that only the user knows
    if code != OK or saved is None:
        if alone:
            yield f"kumi train {file}"
        yield f"kumi describe {file}"
        yield f"kumi data inspect {file}"
        return
    source = saved if run.model.lora is None else run.out / "adapter"
    if source.is_dir():
        target = _free(run.out / ("bfloat16" if run.model.lora is None else "merged"))
        half = " --dtype bfloat16" if run.model.lora is None else ""
        yield f"kumi convert {shlex.quote(str(source))} {shlex.quote(str(target))} --to hf{half}"
    if alone:
        yield f"kumi train {file} train.steps={2 * run.config.train.steps} --allow-change train.steps"
    else:
        yield f"kumi data inspect {file}"
    if exported is not None and run.model.lora is None:
        yield f"python -c {shlex.quote(_load(exported))}"
    else:
        yield f"kumi describe {file}"


def _free(folder: Path) -> Path:
    """Return `folder`, or where that exists the first of its name with -2, -3, ... that does not."""
    names = chain([folder], (folder.with_name(f"{folder.name}-{number}") for number in count(2)))
    return next(name for name in names if not os.path.lexists(name))


def _load(model: Path) -> str:
    """Python that loads and prints `model`, without single quotes where its name allows that."""
    return f"import kumi; print(kumi.load_decoder({json.dumps(str(model))}))"


def lines(found: dict[str, Any]) -> list[str]:
    """Return the `summary` of a run as lines for the terminal."""
    count = f"{found['steps']} of {found['of_steps']}" if found["status"] == "interrupted" else f"{found['steps']}"
    tokens, seconds = format_count(found["tokens"]), format_seconds(found["seconds"])
    parts = [f"{found['status']}: {count} steps, {tokens} tokens, {seconds} of training"]
    losses = [f"{word} loss {first:.4f} -> {last:.4f}" for word in ("train", "validation")
              if found[f"{word}_loss"] for first, last in [found[f"{word}_loss"]]]  # fmt: skip
    parts += [", ".join(losses)] if losses else []
    parts += [f"{word} in {found[word]}" for word in ("model", "checkpoint") if found[word]]
    return [*_labelled("summary", parts), *_labelled("next", found["next"])]


def _labelled(label: str, parts: list[str]) -> list[str]:
    return [f"{label if index == 0 else '':<11}{part}" for index, part in enumerate(parts)]
