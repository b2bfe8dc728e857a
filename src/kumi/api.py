"""The functions of kumi for programs and notebooks. The package `kumi` exports them.

plan_run(run)       -> Report       the layout that `kumi plan` chooses, with the reasons
describe_run(run)   -> dict         the output of `kumi describe --json`
train_run(run)      -> TrainOutput  `kumi train`, with callbacks
generate(model, prompts) -> list[TextReply]  `kumi generate`
tokenizer(source)   -> Tokenizer    the tokenizer of a model or run folder

`run` is a run file, or a mapping of its sections; `overrides` set single keys, as on the command line.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kumi.process_limits import let_threads_sleep

if TYPE_CHECKING:
    from kumi.config.load import Overrides, RunFile
    from kumi.data import Tokenizer
    from kumi.inference.load_model import LoadedModel
    from kumi.inference.prompt_encoder import Prompt
    from kumi.inference.text_generator import TextReply
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
    """Return the fastest layout for `run` with its estimate, `top` runners-up and the standard layouts for comparison.

    run: a run file, where data and steps are optional, or a model: a folder with config.json, or a hub id.
    gpus: the GPUs, such as "16xh100-sxm"; they replace [cluster] of a run file, and are required for a model.
    tokens: also report the time and cost of training on this many tokens.
    trainable: search only layouts that this version of kumi can train.

    This does not import torch. Raise ConfigError, ModelError, LayoutError (the pinned fields are illegal) or FitError
    (no layout fits; the message names the smallest change that would help).
    """
    from kumi.config import plan_input
    from kumi.config.model_plan import load_plan_or_model
    from kumi.plan.session import plan
    from kumi.report.notebook import NotebookReport

    config, _ = load_plan_or_model(run, gpus, overrides)
    inputs = plan_input(config)
    report = plan(inputs.job, inputs.pinned, top=top, trainable=trainable, tokens=tokens, other_nodes=True)
    return NotebookReport(**{field.name: getattr(report, field.name) for field in fields(report)})


def describe_run(run: RunFile, overrides: Overrides = ()) -> dict[str, Any]:
    """Return the model, layout, batch, memory and placement of `run` as plain data. Raise as `plan_run` does."""
    from kumi.report.run_description import describe_run_file

    return describe_run_file(run, overrides)


def train_run(
    run: RunFile,
    overrides: Overrides = (),
    *,
    callbacks: Sequence[TrainerCallback] = (),
    allow_change: Sequence[str] = (),
    verbose: bool = True,
) -> TrainOutput:
    """Train `run`, or resume it, as `kumi train` does, and return how the run ended.

    Training runs in a separate process, which starts the ranks, so a notebook can call this repeatedly; callbacks are
    called in this process meanwhile. Ctrl-C, an exception in a callback, or a callback that sets
    `control.should_training_stop` stops the run after a checkpoint is saved. Under torchrun or srun, which have already
    started the ranks, every rank calls this and trains in its own process; callbacks are called on rank 0.

    `allow_change`: names of run-file keys whose values may differ from those with which the run started. `verbose`:
    print the output of the run. Raise the KumiError with which `kumi train` would end.
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


def generate(
    model: str | Path | LoadedModel,
    prompts: Prompt | Sequence[Prompt],
    *,
    max_new_tokens: int | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    seed: int = 0,
    stop_strings: Sequence[str] = (),
    num_return_sequences: int = 1,
    system: str | None = None,
    chat_template: bool = True,
    batch_size: int | None = None,
    dtype: str | None = None,
    device: str | None = None,
    base: str | Path | None = None,
    checkpoint: str | int | None = None,
) -> list[TextReply]:
    """Return replies to `prompts`, in their order; the samples of a prompt one after another.

    model: a Hugging Face folder or hub id, a run folder, a checkpoint, adapters, or the result of
        `kumi.inference.load_model.load_model`, which is not loaded again.
    prompts: one or several, each a text or a conversation: a list of messages with "role" and "content". A text is a
        message of the user if the model has a chat template and `chat_template` is true, else it is continued.
    max_new_tokens, temperature, top_k, top_p, min_p: those of the model's generation_config.json where they are None. A
        temperature of 0 takes the most likely token.
    stop_strings: texts that end a reply, and are not in it.
    system: the message that begins each conversation without one.
    batch_size: sequences that are decoded at once; None for as many as fit, up to 8.
    dtype, device, base, checkpoint: as in `load_model`.

    Replies are a function of model, prompt, settings and seed, whatever the batch. Raise ConfigError for values out of
    range and for prompts that the model cannot take, FitError if the model and its cache do not fit the free memory.
    """
    let_threads_sleep()
    from kumi.inference.generation import generate_replies
    from kumi.inference.generation_settings import Flags

    options = {"dtype": dtype, "device": device, "base": base, "checkpoint": checkpoint}
    return generate_replies(
        model,
        prompts,
        flags=Flags(max_new_tokens, temperature, top_k, top_p, min_p, seed, tuple(stop_strings)),
        num_return_sequences=num_return_sequences,
        system=system,
        use_template=chat_template,
        batch_size=batch_size,
        options={name: value for name, value in options.items() if value is not None},
    )


def tokenizer(source: str | Path) -> Tokenizer:
    """Return the tokenizer of `source`: a Hugging Face folder or hub id, adapters, a checkpoint, or a run folder.

    Raise ConfigError if `source` has no tokenizer, or if the tokenizer's end-of-text token is unknown.
    """
    from kumi.config.model_source import model_folder
    from kumi.data import load_tokenizer

    folder = model_folder(str(source), "source")
    if not (folder / "tokenizer.json").exists():
        from kumi.convert.load_weights import tokenizer_folder

        folder = tokenizer_folder(folder)
    return load_tokenizer(folder)
