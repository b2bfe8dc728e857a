"""What kumi does, for programs and notebooks. `kumi` exports these functions by the same names.

plan_run(run)       -> Report       the layout that `kumi plan` chooses, with all that explains it
describe_run(run)   -> dict         what `kumi describe --json` prints
train_run(run)      -> TrainOutput  what `kumi train` does, with callbacks
tokenizer(source)   -> Tokenizer    the tokenizer of a model or run folder

`run` is a run file, or a mapping of its sections; `overrides` set single keys, as on the command line.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kumi.config.load import Overrides, RunFile
    from kumi.data import Tokenizer
    from kumi.plan.report import Report
    from kumi.train.callbacks import TrainerCallback
    from kumi.train.run_summary import TrainOutput


def plan_run(
    run: RunFile,
    overrides: Overrides = (),
    *,
    gpus: str | None = None,
    tokens: float | None = None,
    top: int = 6,
    trainable: bool = False,
) -> Report:
    """Return the fastest layout for `run` with its estimate, `top` runners-up and what one might have expected.

    `run` may leave out data and training steps, or be a model: a folder with config.json, or a hub id. `gpus`, such as
    "16xh100-sxm", replaces the machines of a run file, and names those of a model. `tokens`: say how long training on
    so many takes, and what it costs. `trainable`: only layouts that this version of kumi trains itself.
    No torch is imported. Raise ConfigError, ModelError, LayoutError (what is pinned is illegal) or FitError (nothing
    fits; the error names the smallest change that would help).
    """
    from kumi.config import plan_input
    from kumi.config.model_plan import load_plan_or_model
    from kumi.plan.session import plan
    from kumi.report.notebook import NotebookReport

    config, _ = load_plan_or_model(run, gpus, overrides)
    asked = plan_input(config)
    report = plan(asked.job, asked.pinned, top=top, trainable=trainable, tokens=tokens)
    return NotebookReport(**{field.name: getattr(report, field.name) for field in fields(report)})


def describe_run(run: RunFile, overrides: Overrides = ()) -> dict[str, Any]:
    """Return the model, layout, batch, memory and placement of `run` as plain data. Raise as `plan_run` does."""
    from kumi.report.run_description import described

    return described(run, overrides)


def train_run(
    run: RunFile,
    overrides: Overrides = (),
    *,
    callbacks: Sequence[TrainerCallback] = (),
    allow_change: Sequence[str] = (),
    verbose: bool = True,
) -> TrainOutput:
    """Train `run`, or go on with it, and return how it ended; the run folder is that of `kumi train`.

    Training runs in a process of its own, which starts the ranks, so that a notebook can call this as often as it
    likes; callbacks are called in this process while it goes on. Ctrl-C, a callback's exception, or a callback that
    sets `control.should_training_stop` stop the run after a checkpoint is saved. Under torchrun or srun, which have
    started the ranks, every rank calls this and trains in its own process; callbacks are called on rank 0.

    `allow_change` names keys that may differ from those of the run's earlier start. `verbose`: print what the run
    prints. Raise the KumiError that `kumi train` would end with.
    """
    from kumi.config import load
    from kumi.launch.local import is_rank
    from kumi.train.callbacks import Callbacks
    from kumi.train.run_summary import train_output

    config = load(run, overrides)
    listener = Callbacks(config, callbacks)
    if is_rank(os.environ):
        from kumi.train.start import start

        start(config, allow_change=allow_change, listener=listener)
    else:
        from kumi.train.child_process import train_in_child

        train_in_child(config, listener, allow_change, print if verbose else lambda line: None)
    return train_output(config)


def tokenizer(source: str | Path) -> Tokenizer:
    """Return the tokenizer of `source`: a Hugging Face folder or hub id, adapters, a checkpoint, or a run folder.

    Raise ConfigError where there is none, or its end mark is not known.
    """
    from kumi.config.model_source import model_folder
    from kumi.data import load_tokenizer

    folder = model_folder(str(source), "source")
    if not (folder / "tokenizer.json").exists():
        from kumi.convert.load_weights import tokenizer_folder

        folder = tokenizer_folder(folder)
    return load_tokenizer(folder)
