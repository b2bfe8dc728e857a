"""Seconds of single operations on a device: matmuls, and operations bound by memory bandwidth."""

from __future__ import annotations

import numpy as np

from kumi.errors import ConfigError
from kumi.plan.layout_batch import Floats, Numbers
from kumi.spec.cluster import Device

# Output tiles of matmul kernels as (rows, columns, speed relative to the best tile). Smaller tiles load more bytes per
# FLOP.
_TILES = ((128, 256, 1.0), (256, 128, 1.0), (128, 128, 0.95), (64, 128, 0.80), (64, 64, 0.65))

# Share of full speed when a dimension is a multiple of 64, 32, 16, 8, 4, 2, 1 elements of 2 bytes: tensor cores read
# rows in chunks of 128 bytes, and load elements one by one where rows are not aligned to 16 bytes.
_ALIGNMENT_SPEED = (1.0, 0.97, 0.94, 0.88, 0.62, 0.55, 0.35)

# Bytes per element of matmul inputs, 2 for other dtypes.
_MATMUL_ITEMSIZE = {"float64": 8.0, "float32": 4.0, "float8": 1.0, "float4": 0.5}

# Inner dimension at which a tile's fixed cost (prologue and epilogue) equals the time of its FLOPs.
_FIXED_DEPTH = 40.0


def peak_flops(device: Device, dtype: str) -> float:
    """Return the FLOP/s of `device` in `dtype` on its data sheet. Raise ConfigError if they are unknown."""
    peak = device.peak_flops(dtype)
    if not peak:
        dtypes = ", ".join(name for name, _ in device.peak) or "none"
        raise ConfigError(
            f"cluster: the peak FLOP/s of {device.name} in {dtype} is not known (known: {dtypes}); "
            f"measure it with `kumi bench`, or name a preset or a file that has it"
        )
    return peak


def alignment_efficiency(size: Numbers) -> Floats:
    """Return the share of full speed for a dimension of `size` elements (see `_ALIGNMENT_SPEED`)."""
    elements = np.maximum(np.asarray(size, np.int64), 1)
    power_of_two = np.minimum(np.log2(elements & -elements), 6).astype(np.int64)
    share: Floats = np.array(_ALIGNMENT_SPEED[::-1])[power_of_two]
    return share


def matmul_seconds(device: Device, dtype: str, rows: Numbers, inner: Numbers, columns: Numbers) -> Floats:
    """Return the seconds of a (rows x inner) @ (inner x columns) matmul, without kernel launch.

    This is the larger of compute time and memory time. Compute time counts full waves of output tiles over the
    processors: a partly empty last wave takes as long as a full wave. Memory time counts the bytes of the matrices.
    """
    rows, inner, columns = np.broadcast_arrays(rows, inner, columns)
    speed = np.asarray(peak_flops(device, dtype) * device.matmul_share(dtype))
    flops = 2.0 * rows * inner * columns
    if device.processors:
        fixed_share = _FIXED_DEPTH / (inner + _FIXED_DEPTH)
        flops = 2.0 * inner * _padded_area(device.processors, rows, columns) / (1 - fixed_share)
        speed = speed * np.minimum(alignment_efficiency(inner), alignment_efficiency(columns))
    size = _MATMUL_ITEMSIZE.get(dtype, 2)
    moved = size * (rows * inner + inner * columns) + max(size, 2) * rows * columns
    return np.asarray(np.maximum(flops / speed, stream_seconds(device, moved)))


def _padded_area(processors: int, rows: Floats, columns: Floats) -> Floats:
    """Return the output elements that the processors compute, padding included, with the best of `_TILES`."""
    best = np.full(np.shape(rows), np.inf)
    for height, width, speed in _TILES:
        tiles = np.ceil(rows / height) * np.ceil(columns / width)
        # Kernels split the inner dimension where tiles are few, so waves count in quarters.
        waves = np.ceil(4 * tiles / processors) / 4
        best = np.minimum(best, waves * processors * height * width / speed)
    return best


def attention_shares(device: Device, tokens: Numbers) -> tuple[Floats, Floats]:
    """Return the shares of the peak that fused attention reaches in documents of `tokens` tokens, forward and backward.

    Between two measured lengths a share is linear in the logarithm of the length; beyond them it is the nearest one.
    """
    if not device.attention_lengths:
        forward, backward = (np.full(np.shape(tokens), share) for share in device.attention)
        return forward, backward
    lengths, *speeds = np.array(device.attention_lengths, np.float64).T
    shares = (
        share * np.interp(np.log(tokens), np.log(lengths), speed)
        for share, speed in zip(device.attention, speeds, strict=True)
    )
    forward, backward = map(np.asarray, shares)
    return forward, backward


def stream_seconds(device: Device, moved: Numbers) -> Floats:
    """Return the seconds to read or write `moved` bytes of device memory, 0 if the bandwidth is unknown."""
    if not device.memory_bandwidth:
        return np.zeros_like(moved, dtype=np.float64)
    return np.asarray(moved / (device.memory_bandwidth * device.stream), np.float64)
