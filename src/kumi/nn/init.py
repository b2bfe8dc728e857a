"""Initial weights from a seed, whatever the layout.

A tensor is filled in blocks of whole rows, each from its own generator keyed by (seed, name, block): a rank that holds
some of the rows fills them alone, and they equal those of the full tensor.
"""

from __future__ import annotations

import hashlib
from math import prod

import torch
from torch import Tensor, nn

from kumi.spec.ledger import params
from kumi.spec.model import ModelSpec
from kumi.spec.sharding import shard_rows

# Elements of a block; a change would change every model started from a seed.
_BLOCK = 2**18


def init_weights(module: nn.Module, spec: ModelSpec, seed: int) -> None:
    """Fill every parameter of `module` as Hugging Face does: normal(0, initializer_range) matrices, ones and zeros.

    Parameters may be tensors, or DTensors cut along dim 0: each rank then fills its own rows.
    """
    kinds = {param.name: param.init for param in params(spec)}
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            local, start = _local(parameter)
            if kinds[name] == "normal":
                fill(local, name, tuple(parameter.shape), row_start=start, std=spec.initializer_range, seed=seed)
            else:
                local.fill_(1.0 if kinds[name] == "ones" else 0.0)


def fill(
    out: Tensor, name: str, shape: tuple[int, ...], *, row_start: int = 0, std: float = 1.0, seed: int = 0
) -> None:
    """Fill `out`, rows `row_start` and on of the tensor `name` of global `shape`, with its part of normal(0, std)."""
    width = prod(shape[1:])
    height = max(1, _BLOCK // max(1, width))
    stop = row_start + out.shape[0]
    for block in range(row_start // height, -(-stop // height) if stop > row_start else 0):
        first, last = block * height, min((block + 1) * height, shape[0])
        values = torch.randn(last - first, *shape[1:], generator=_generator(seed, name, block)) * std
        begin, end = max(first, row_start), min(last, stop)
        out[begin - row_start : end - row_start].copy_(values[begin - first : end - first])


def _generator(seed: int, name: str, block: int) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}/{name}/{block}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))


def _local(parameter: Tensor) -> tuple[Tensor, int]:
    """The rows of `parameter` on this rank and the number of the first of them."""
    mesh = getattr(parameter, "device_mesh", None)
    if mesh is None:
        return parameter, 0
    start = 0
    for dim, placement in enumerate(parameter.placements):  # type: ignore[attr-defined]
        if placement.is_shard(0):
            start = shard_rows(parameter.shape[0], mesh.size(dim), mesh.get_local_rank(dim)).start
    return parameter.to_local(), start  # type: ignore[attr-defined]
