"""Load weights from disk into memory: a decoder, or a slice of a tensor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from kumi.convert import kumi_checkpoint, merge
from kumi.convert.hf import read_folder
from kumi.convert.hf.publish import model_folder_of
from kumi.convert.open_model import is_adapter_folder, open_source
from kumi.errors import ConfigError
from kumi.nn import initialize
from kumi.nn.decoder import Decoder
from kumi.spec.ledger import params
from kumi.spec.model import ModelSpec
from kumi.storage import checkpoint


def load_decoder(source: str | Path, *, dtype: torch.dtype = torch.float32, base: str | Path | None = None) -> Decoder:
    """Return the model in `source`, its weights in `dtype`: a module from token ids (B, S) to logits (B, S, V).

    `source` is a Hugging Face folder or hub id, a kumi checkpoint, a run folder (its last checkpoint is loaded), a
    Megatron-Core checkpoint that describes its model, or a folder of PEFT adapters. Adapters stay separate modules on
    their base model, which is `base`, or else the model that they name. Tensors are read one at a time.

    Raise ModelError unless `source` holds exactly the tensors of its configuration, RefusedError for a damaged
    checkpoint, ConfigError if `source` does not exist, or if `base` is given for a complete model.
    """
    folder = model_folder(source)
    if is_adapter_folder(folder):
        return merge.unmerged_decoder(merge.open_unmerged(folder, None if base is None else str(base)), dtype)
    if base is not None:
        raise ConfigError(
            f"base={str(base)!r}: only adapters have a base model, and {folder} holds a complete model; leave base out"
        )
    return open_source(folder).decoder(dtype)


def model_folder(source: str | Path) -> Path:
    """Return the folder of the model `source`.

    It is `source` itself, its download from the hub, or the last checkpoint of a run folder. Raise ConfigError if there
    is no such folder.
    """
    folder = model_folder_of(source, "source")
    if not folder.is_dir():
        raise ConfigError(
            f"{str(source)!r}: neither a folder below {Path.cwd()} nor a hub id (org/name); name a model's folder"
        )
    last = checkpoint.latest(folder / "checkpoints")
    return folder if last is None or (folder / "config.json").exists() else last


def tokenizer_folder(source: str | Path) -> Path:
    """Return the folder with the tokenizer of `source`, as `load_decoder` takes it; for adapters, their base model's.

    Raise ConfigError if the checkpoint in `source` names no tokenizer.
    """
    folder = model_folder(source)
    if is_adapter_folder(folder):
        return merge.open_unmerged(folder).base.folder
    if not kumi_checkpoint.is_checkpoint(folder):
        return folder
    tokenizer = kumi_checkpoint.open_saved_model(folder).tokenizer
    if tokenizer is None:
        raise ConfigError(f"{folder}: this checkpoint names no tokenizer; name the folder of its tokenizer")
    return tokenizer


def weights_reader(
    folder: str | Path, spec: ModelSpec, seed: int = 0
) -> Callable[[str, tuple[int, ...], tuple[int, ...]], Tensor]:
    """Return a function `read("model/<parameter>", start, shape)` that reads a slice of a tensor from `folder`.

    If `spec` is a reward model and `folder` a language model, the score head is drawn from `seed`. Raise ModelError
    unless `folder` holds exactly the other tensors of `spec`.
    """
    stored = read_folder.locate_params(folder, read_folder.spec_of_folder(folder, spec))
    drawn = {param.name: param for param in params(spec) if param.name not in stored}

    def read(name: str, start: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        name = name.removeprefix("model/")
        if name not in drawn:
            return read_folder.read(stored[name], start, shape)
        out = torch.empty(shape)
        initialize.fill(out, drawn[name], start, std=spec.initializer_range, seed=seed)
        return out

    return read
