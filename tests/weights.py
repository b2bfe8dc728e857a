"""Initialise decoders that tests build, and read the tensors of model folders."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from kumi.convert.files.stored_tensor import read_entry
from kumi.convert.hf.read_folder import file_entries
from kumi.nn.initialize import fill
from kumi.spec.ledger import tensors
from kumi.spec.model import ModelSpec


def init_weights(module: nn.Module, spec: ModelSpec, seed: int) -> None:
    """Fill every parameter and buffer of `module` like a run on one device with the seed `seed`."""
    specs = {tensor.name: tensor for tensor in tensors(spec)}
    with torch.no_grad():
        for name, tensor in module.state_dict().items():
            fill(tensor, specs[name], (0,) * tensor.ndim, std=spec.initializer_range, seed=seed)


def read_tensors(folder: str | Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the tensor of every entry in the weight files of `folder`."""
    return ((name, read_entry(entry)) for name, entry in file_entries(folder).items())
