"""Weights of a Hugging Face folder into memory: a whole decoder, or any part of a tensor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from kumi.convert import hf
from kumi.nn.decoder import Decoder
from kumi.spec import families
from kumi.spec.model import ModelSpec


def load_decoder(folder: str | Path, *, dtype: torch.dtype = torch.float32) -> Decoder:
    """The model in a Hugging Face folder, its weights in `dtype`: a module from token ids (B, S) to logits (B, S, V).

    Tensors are read one at a time. ModelError when the folder does not hold exactly the tensors of its config.json.
    """
    spec = families.load(folder)
    families.check_trained(spec)
    stored = hf.check(folder, spec)
    decoder = Decoder(spec, dtype=dtype)
    with torch.no_grad():
        for name, tensor in decoder.state_dict().items():
            tensor.copy_(hf.read(stored[name]))
    return decoder


def weights_reader(folder: str | Path, spec: ModelSpec) -> Callable[[str, tuple[int, ...], tuple[int, ...]], Tensor]:
    """A function that reads one part of a tensor, `read("model/<parameter>", start, shape)`, from a checked folder."""
    stored = hf.check(folder, spec)

    def read(name: str, start: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        return hf.read(stored[name.removeprefix("model/")], start, shape)

    return read
