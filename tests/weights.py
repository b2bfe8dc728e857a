"""Weights for decoders that tests build by themselves."""

from __future__ import annotations

import torch
from torch import nn

from kumi.nn.init import fill
from kumi.spec.ledger import tensors
from kumi.spec.model import ModelSpec


def init_weights(module: nn.Module, spec: ModelSpec, seed: int) -> None:
    """Fill every parameter and buffer of `module` as a run on one device does that starts from `seed`."""
    known = {tensor.name: tensor for tensor in tensors(spec)}
    with torch.no_grad():
        for name, tensor in module.state_dict().items():
            fill(tensor, known[name], (0,) * tensor.ndim, std=spec.initializer_range, seed=seed)
