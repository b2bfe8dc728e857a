"""NEFTune: uniform noise on the token embeddings in training (Jain et al., 2023, arXiv:2310.05914).

    x + alpha / sqrt(L * D) * u,    u uniform in [-1, 1)

L is the number of tokens of the document that a token belongs to. Hugging Face's trainers take the length of the padded
row; for a row that is one document without padding, both are equal.

The noise of a token is a function of the seed, the step, the row's index in the step and the position in the row. It is
drawn in blocks of positions, so that a rank that has a part of a row draws only the blocks of this part.
"""

from __future__ import annotations

import hashlib
from math import sqrt

import torch
from torch import Tensor

# Positions per block. Changing this changes the noise of every seed.
_BLOCK = 128


def scaled_noise(noise: Tensor, lengths: int | Tensor, alpha: float) -> Tensor:
    """Return `noise` (T, D) times alpha / sqrt(L * D), with L the document's length of each token.

    `lengths`: (T,), or one length for all tokens.
    """
    if isinstance(lengths, int):
        return noise * (alpha / sqrt(lengths * noise.shape[-1]))
    factor: Tensor = alpha / (lengths.to(torch.float32) * noise.shape[-1]).sqrt()
    return noise * factor[:, None]


def row_noise(positions: Tensor, size: int, *, device: torch.device, seed: int, step: int, row: int) -> Tensor:
    """Return u (N, size), uniform in [-1, 1) in float32, of the `positions` (N,) in row `row` of the step.

    `positions` may have any order. They are on the CPU, so that the host need not wait for the device.
    """
    blocks, places = torch.unique(positions // _BLOCK, return_inverse=True)
    drawn = torch.stack([_block_noise(size, device, f"{seed}/{step}/{row}/{block}") for block in blocks.tolist()])
    return drawn.flatten(0, 1)[(places * _BLOCK + positions % _BLOCK).to(device)]


def _block_noise(size: int, device: torch.device, key: str) -> Tensor:
    digest = hashlib.sha256(f"neftune/{key}".encode()).digest()
    generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.empty(_BLOCK, size, device=device).uniform_(-1, 1, generator=generator)
