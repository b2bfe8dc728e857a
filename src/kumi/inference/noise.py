"""Random numbers for sampling as a function of a key and a token id, so that no layout, batch or order changes them.

A draw needs one number for each token of the vocabulary. A generator with a state would tie these to the order of
draws; here they are a hash of (key, token id), the same on every device, and any slice of the vocabulary can be
computed alone. The hash is the finaliser of MurmurHash3 (Appleby, 2011), applied once with each half of the key.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1


def sequence_key(seed: int, prompt: Sequence[int], sample: int) -> int:
    """Return 64 bits that identify sample number `sample` of the token ids `prompt` under `seed`."""
    text = f"{seed}/{sample}/" + ",".join(map(str, prompt))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())


def position_key(sequence: int, position: int) -> int:
    """Return the key (64 bits) of the token at `position` of the reply of a sequence with key `sequence`."""
    key = (sequence + position * _GOLDEN) & _MASK
    key = ((key ^ (key >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    key = ((key ^ (key >> 27)) * 0x94D049BB133111EB) & _MASK
    return key ^ (key >> 31)


def log_exponentials(keys: Sequence[int], first: int, count: int, *, device: torch.device) -> Tensor:
    """Return the logarithms (N, count) of standard exponential variates, float32.

    Row n, column i is a function of keys[n] and the token id first + i only.
    """
    low, high = (torch.tensor([_signed(key >> shift) for key in keys], device=device) for shift in (0, 32))
    ids = torch.arange(first, first + count, dtype=torch.int32, device=device)
    bits = _mix((ids * _signed(_GOLDEN)) ^ low.int()[:, None])
    bits = _mix(bits ^ high.int()[:, None])
    # In (0, 1): 24 bits and a half, so that no value rounds to 0 or 1.
    uniform = bits.bitwise_and_(0xFFFFFF).float().add_(0.5).mul_(2.0**-24)
    return uniform.neg_().log1p_().neg_().log_()


def _mix(bits: Tensor) -> Tensor:
    """Return a bijection of `bits` (int32) in which every bit of the input flips each bit of the result half of the
    time."""
    bits = bits ^ ((bits >> 16) & 0xFFFF)
    bits = bits * _signed(0x85EBCA6B)
    bits = bits ^ ((bits >> 13) & 0x7FFFF)
    bits = bits * _signed(0xC2B2AE35)
    return bits ^ ((bits >> 16) & 0xFFFF)


def _signed(value: int) -> int:
    """Return the lowest 32 bits of `value` as a signed number."""
    value &= 0xFFFFFFFF
    return value - 2**32 if value >= 2**31 else value
