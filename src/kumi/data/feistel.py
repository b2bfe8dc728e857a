"""Keyed pseudo-random permutation of [0, size), computed for single indices without a table.

A Feistel network on the smallest even number of bits that covers `size`. A result outside [0, size) is permuted again
until it is inside (cycle walking, fewer than 4 passes on average). Source: Black and Rogaway, "Ciphers with arbitrary
finite domains"."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

_Array = npt.NDArray[Any]
_ROUNDS = 6
_STEP = 0x9E3779B97F4A7C15  # the increment of splitmix64


def scramble(values: _Array) -> _Array:
    """Return a 64-bit hash of each value, by the finaliser of splitmix64 (Steele et al., 2014)."""
    mixed = values.astype(np.uint64)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def key(seed: int, *numbers: int | _Array) -> _Array:
    """Return a 64-bit key for a seed and further numbers, (1,); arrays of numbers give an array of keys."""
    state = scramble(np.array([seed % 2**64], np.uint64))
    for number in numbers:
        state = scramble(state + (np.atleast_1d(number).astype(np.uint64) + np.uint64(1)) * np.uint64(_STEP))
    return state


def permute(indices: _Array, size: int, keys: _Array) -> _Array:
    """Return the image of each index in [0, size) under its key, uint64; a bijection for each key."""
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    result = indices.astype(np.uint64)
    keys = np.broadcast_to(keys, result.shape)
    walking = np.ones(result.shape, bool)
    while walking.any():
        result[walking] = _feistel(result[walking], half, keys[walking])
        walking = result >= np.uint64(size)
    return result


def _feistel(values: _Array, half: int, keys: _Array) -> _Array:
    """Return the Feistel permutation of each value of 2 * `half` bits."""
    shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = values >> shift, values & mask
    for number in range(_ROUNDS):
        salt = np.uint64((number + 1) * _STEP % 2**64)
        left, right = right, left ^ (scramble(right + (keys ^ salt)) & mask)
    return (left << shift) | right
