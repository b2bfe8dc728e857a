"""Initial weights from a seed, independent of the layout.

A tensor is filled in blocks of complete rows. Each block has its own generator, seeded by (seed, name, block). A rank
that holds a part of the tensor fills only that part, and gets the same values as in the full tensor.
"""

from __future__ import annotations

import hashlib
from math import prod, sqrt

import torch
from torch import Tensor

from kumi.spec.op import Param

# Elements per block. Changing this changes the initial weights of every seed.
_BLOCK = 2**18
# The smallest and the largest initial step of a Mamba mixer's heads.
_STEP_RANGE = 0.001, 0.1


def fill(out: Tensor, param: Param, start: tuple[int, ...], *, std: float, seed: int) -> None:
    """Fill `out` with ones, zeros, or normal(0, std). `out` is the slice of `param` that begins at the indices `start`.

    `param.init` names what to fill it with. Beside "ones", "zeros" and "normal", it may be:

    - "normal" followed by another std, for adapters;
    - "kaiming" followed by the number of inputs, for adapters: uniform between -1 / sqrt(inputs) and 1 / sqrt(inputs)
      (He et al., 2015, arXiv:1502.01852, with the slope that PyTorch uses for new linear layers);
    - "log_index", for Mamba: the logarithms of 1, 2, ... (Dao and Gu's code);
    - "step", for Mamba: values whose softplus is 0.001 to 0.1 (Dao and Gu's code).
    """
    kind, _, number = param.init.partition(" ")
    if kind in ("ones", "zeros"):
        out.fill_(1.0 if kind == "ones" else 0.0)
        return
    std = float(number) if kind == "normal" and number else std
    columns = tuple(slice(first, first + size) for first, size in zip(start[1:], out.shape[1:], strict=True))
    height = max(1, _BLOCK // max(1, prod(param.shape[1:])))
    stop = start[0] + out.shape[0]
    for block in range(start[0] // height, -(-stop // height) if stop > start[0] else 0):
        first, last = block * height, min((block + 1) * height, param.shape[0])
        generator, shape = _generator(seed, param.name, block), (last - first, *param.shape[1:])
        if kind == "normal":
            values = torch.randn(shape, generator=generator) * std
        elif kind == "log_index":
            values = torch.arange(first + 1, last + 1).log()
        elif kind == "step":
            least, most = _STEP_RANGE
            steps = least * (most / least) ** torch.rand(shape, generator=generator)
            values = steps + (-torch.expm1(-steps)).log()  # the inverse of softplus
        else:
            assert kind == "kaiming", f"{param.name} has the unknown init {param.init!r}"
            values = (torch.rand(shape, generator=generator) * 2 - 1) / sqrt(int(number))
        begin, end = max(first, start[0]), min(last, stop)
        out[begin - start[0] : end - start[0]].copy_(values[(slice(begin - first, end - first), *columns)])


def _generator(seed: int, name: str, block: int) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}/{name}/{block}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
