"""Load a model that generates text: its decoder, tokenizer, chat template and the tokens that end a reply."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from kumi.convert import merge
from kumi.data.chat.template import ChatTemplate, find_template
from kumi.data.tokenizer import Tokenizer
from kumi.data.tokenizer import load as load_tokenizer
from kumi.errors import ConfigError
from kumi.inference.model_files import ModelFiles, find_model, stop_ids
from kumi.nn.decoder import Decoder
from kumi.spec.data_source import ChatOptions
from kumi.spec.ledger import params

DTYPES = ("float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True)
class ModelTexts:
    """How a model reads and writes text, without its weights.

    stop_ids: the ids that end a reply, from generation_config.json or the tokenizer.
    name, folder, settings, chat, chosen: as in `kumi.inference.model_files.ModelFiles`.
    """

    name: str
    folder: Path
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    stop_ids: frozenset[int]
    settings: Mapping[str, Any]
    chat: ChatOptions
    chosen: str


@dataclass(frozen=True)
class LoadedModel(ModelTexts):
    """A model in memory, ready to generate. `decoder`: in evaluation mode, without gradients."""

    decoder: Decoder


def load_model(
    path: str | Path,
    *,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    base: str | Path | None = None,
    checkpoint: str | int | None = None,
) -> LoadedModel:
    """Return the model at `path`: a Hugging Face folder or hub id, a checkpoint, a run folder, or adapters.

    dtype: of the weights; None for the dtype of the files, as `dtype="auto"` of transformers.
    device: None for a GPU if there is one, else the CPU.
    base: the base model of adapters, if it is not the base that they name. The adapters stay separate modules.
    checkpoint: of a run folder: "best", "last" or a step; by default the best one where the run keeps one by
        checkpoint.best, else the last.

    No code of the model's folder is run. Raise as `kumi.inference.model_files.find_model` does, and ConfigError for a
    dtype that is not one of `DTYPES`.
    """
    return load_files(find_model(path, base=base, checkpoint=checkpoint), dtype=dtype, device=device)


def read_texts(files: ModelFiles) -> ModelTexts:
    """Return the tokenizer, the chat template and the stop tokens of `files`. Raise as `find_model` does."""
    tokenizer = load_tokenizer(files.tokenizer_folder)
    template = find_template(files.chat, files.tokenizer_folder)
    stops = stop_ids(files, tokenizer)
    return ModelTexts(files.name, files.folder, tokenizer, template, stops, files.settings, files.chat, files.chosen)


def load_files(
    files: ModelFiles,
    texts: ModelTexts | None = None,
    *,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
) -> LoadedModel:
    """Load the weights of `files`; see `load_model`. `texts`: those of `files`, if they are read already."""
    weights = getattr(torch, weight_dtype(files, dtype))
    texts = texts or read_texts(files)
    adapted, source = files.adapted, files.source
    decoder = source.decoder(weights) if adapted is None else merge.unmerged_decoder(adapted, weights)
    decoder = decoder.to(default_device() if device is None else device).eval().requires_grad_(False)
    return LoadedModel(**vars(texts), decoder=decoder)


def default_device() -> torch.device:
    """Return the current GPU if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def weight_dtype(files: ModelFiles, dtype: str | torch.dtype | None = None) -> str:
    """Return the name of `dtype`; if it is None, the dtype that most weights of `files` have.

    Raise ConfigError for a `dtype` that is not one of `DTYPES`.
    """
    if dtype is None:
        sizes: Counter[str] = Counter()
        for param in params(files.spec):
            sizes[files.source.dtypes[param.name]] += prod(param.shape)
        return sizes.most_common(1)[0][0]
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ConfigError(f"dtype={name!r} must be one of {', '.join(DTYPES)}")
    return name
