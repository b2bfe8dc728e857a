"""Random numbers for sampling as a function of a key and a token id, so that no layout, batch or order changes them.

A draw needs one number for each token of the vocabulary. A generator with a state would tie these to the order of
draws; here they are a hash of (key, token id), the same on every device, and any slice of the vocabulary can be
computed alone. The hash is the finaliser of MurmurHash3 (Appleby, 2011), applied once with each half of the key. The
key of a position is a number of SplitMix64 (Steele et al., 2014), which starts at the key of the sequence.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kumi.data.binfile import Array

# The increment of SplitMix64: 2^64 divided by the golden ratio.
_GOLDEN = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1
# The steps of MurmurHash3's finaliser for 32 bits: shift and xor, multiply, and so on.
_SHIFTS, _FACTORS = (16, 13, 16), (0x85EBCA6B, 0xC2B2AE35)
# Numbers that a CPU mixes at a time: they and a second array stay in its level-2 cache.
_BLOCK = 65_536


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
    if device.type == "cpu":
        bits = torch.from_numpy(_bits_on_host(keys, first, count).view(np.int32))
    else:
        low, high = (torch.tensor([_signed(key >> shift) for key in keys], device=device) for shift in (0, 32))
        ids = torch.arange(first, first + count, dtype=torch.int32, device=device)
        bits = _mix((ids * _signed(_GOLDEN)) ^ low.int()[:, None])
        bits = _mix(bits ^ high.int()[:, None]).bitwise_and_(0xFFFFFF)
    # log(-log(1 - u)) with u = (24 bits + 1/2) / 2^24; in float32 the largest of these numbers would round to 2^24.
    return bits.float().add_(0.5).clamp_(max=2.0**24 - 1).mul_(-(2.0**-24)).log1p_().neg_().log_()


def _mix(bits: Tensor) -> Tensor:
    """Return a bijection of `bits` (int32) in which every bit of the input flips each bit of the result half of the
    time."""
    for shift, factor in zip(_SHIFTS, (*_FACTORS, None), strict=True):
        bits = bits ^ ((bits >> shift) & (0xFFFFFFFF >> shift))
        bits = bits if factor is None else bits * _signed(factor)
    return bits


def _bits_on_host(keys: Sequence[int], first: int, count: int) -> Array:
    """Return the 24 bits (N, count), uint32, of each key and token id: what `_mix` computes, in fewer passes.

    PyTorch has no logical shift, and its operators on integers are several times slower than NumPy's.
    """
    ids = np.arange(first, first + count, dtype=np.uint32) * np.uint32(_GOLDEN & 0xFFFFFFFF)
    halves = np.array([(key & 0xFFFFFFFF, key >> 32) for key in keys], np.uint32)
    bits, rows = np.empty((len(keys), count), np.uint32), max(1, _BLOCK // max(1, count))
    scratch = np.empty((min(rows, len(keys)), count), np.uint32)
    for start in range(0, len(keys), rows):
        block, part = bits[start : start + rows], halves[start : start + rows]
        np.bitwise_xor(ids, part[:, :1], out=block)
        _mix_in_place(block, scratch[: len(block)])
        np.bitwise_xor(block, part[:, 1:], out=block)
        _mix_in_place(block, scratch[: len(block)])
        np.bitwise_and(block, 0xFFFFFF, out=block)
    return bits


def _mix_in_place(bits: Array, scratch: Array) -> None:
    """Replace `bits` (uint32) by the result of `_mix`; `scratch` of the same shape is overwritten."""
    for shift, factor in zip(_SHIFTS, (*_FACTORS, None), strict=True):
        np.right_shift(bits, shift, out=scratch)
        np.bitwise_xor(bits, scratch, out=bits)
        if factor is not None:
            np.multiply(bits, factor, out=bits)


def _signed(value: int) -> int:
    """Return the lowest 32 bits of `value` as a signed number."""
    value &= 0xFFFFFFFF
    return value - 2**32 if value >= 2**31 else value
