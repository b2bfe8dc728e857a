"""Weights on disk into memory: a whole decoder, or any part of a tensor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from kumi.convert import hf, merge, native
from kumi.convert.publish import located
from kumi.convert.source import is_apart, open_source
from kumi.errors import ConfigError
from kumi.nn.decoder import Decoder
from kumi.spec.model import ModelSpec
from kumi.storage import checkpoint


def load_decoder(source: str | Path, *, dtype: torch.dtype = torch.float32, base: str | Path | None = None) -> Decoder:
    """Return the model in `source`, its weights in `dtype`: a module from token ids (B, S) to logits (B, S, V).

    `source` is a Hugging Face folder or hub id, a checkpoint of kumi, a run folder (its last checkpoint counts), a
    Megatron-Core checkpoint that says what its model is, or a folder of PEFT adapters. Adapters stay modules of their
    own beside the matrices of their base model: `base`, or the one that they name. Tensors are read one at a time.

    Raise ModelError unless `source` holds exactly the tensors of its configuration, RefusedError where a checkpoint is
    damaged, ConfigError where there is no such source, or `base` is given for a whole model.
    """
    folder = model_folder(source)
    if is_apart(folder):
        decoder = merge.decoder_of(merge.open_beside(folder, None if base is None else str(base)))
        return decoder.to(dtype)
    if base is not None:
        raise ConfigError(f"base={str(base)!r} is for adapters, and {folder} holds a whole model; leave it out")
    return open_source(folder).decoder(dtype)


def model_folder(source: str | Path) -> Path:
    """Return the folder of the model `source`: itself, the hub's copy, or the last checkpoint of a run folder.

    Raise ConfigError where there is no such folder.
    """
    folder = located(source, "source")
    if not folder.is_dir():
        raise ConfigError(
            f"{str(source)!r}: no such folder below {Path.cwd()}, and no hub id (org/name); name a model's folder"
        )
    last = checkpoint.latest(folder / "checkpoints")
    return folder if last is None or (folder / "config.json").exists() else last


def tokenizer_folder(source: str | Path) -> Path:
    """Return the folder with the tokenizer of `source`, which `load_decoder` takes; of adapters, their base's.

    Raise ConfigError where the checkpoint in `source` does not name one.
    """
    folder = model_folder(source)
    if is_apart(folder):
        return merge.open_beside(folder).base.folder
    if not native.is_checkpoint(folder):
        return folder
    named = native.open_model(folder).tokenizer
    if named is None:
        raise ConfigError(f"{folder}: this checkpoint names no tokenizer; name the folder of its tokenizer")
    return named


def weights_reader(folder: str | Path, spec: ModelSpec) -> Callable[[str, tuple[int, ...], tuple[int, ...]], Tensor]:
    """A function that reads one part of a tensor, `read("model/<parameter>", start, shape)`, from a checked folder."""
    stored = hf.check(folder, spec)

    def read(name: str, start: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        return hf.read(stored[name.removeprefix("model/")], start, shape)

    return read
