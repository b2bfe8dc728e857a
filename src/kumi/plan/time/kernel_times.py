"""How long one operation takes on a device: matrix products, attention, and work bound by memory bandwidth."""

from __future__ import annotations

import numpy as np

from kumi.errors import ConfigError
from kumi.plan.layout_batch import Floats, Numbers
from kumi.spec.cluster import Device

# Tiles that matrix-product kernels cut the result into, and the share of the best tile's speed each reaches: a smaller
# tile loads more bytes for each product.
TILES = ((128, 256, 1.0), (256, 128, 1.0), (128, 128, 0.95), (64, 128, 0.80), (64, 64, 0.65))

# Share of full speed when a dimension is a multiple of 64, 32, 16, 8, 4, 2, 1 elements of 2 bytes: tensor cores read
# rows in pieces of 128 bytes, and copy what is not aligned to 16 bytes element by element.
ALIGNED = (1.0, 0.97, 0.94, 0.88, 0.62, 0.55, 0.35)

# Bytes of an element that a product reads.
ITEMSIZE = {"float64": 8.0, "float32": 4.0, "float8": 1.0, "float4": 0.5}

# Length of the inner dimension at which a tile's fixed cost (its prologue and epilogue) equals its products.
FIXED_DEPTH = 40.0


def peak_flops(device: Device, dtype: str) -> float:
    """FLOP/s of `device` in `dtype` on the data sheet. Raises ConfigError where none is known."""
    found = device.peak_flops(dtype)
    if not found:
        known = ", ".join(name for name, _ in device.peak) or "none"
        raise ConfigError(
            f"cluster: the peak FLOP/s of {device.name} in {dtype} is not known (known: {known}); "
            f"measure it with `kumi bench`, or name a preset or a file that has it"
        )
    return found


def alignment(size: Numbers) -> Floats:
    """Share of full speed for a dimension of `size` elements (see `ALIGNED`)."""
    whole = np.maximum(np.asarray(size, np.int64), 1)
    power = np.minimum(np.log2(whole & -whole), 6).astype(np.int64)
    found: Floats = np.array(ALIGNED[::-1])[power]
    return found


def matmul_seconds(device: Device, dtype: str, rows: Numbers, inner: Numbers, columns: Numbers) -> Floats:
    """Seconds of a (rows x inner) @ (inner x columns) product, launch not included.

    The larger of two times: the products, in whole waves of tiles over the processors (a last wave that is half empty
    takes as long as a full one), and the bytes of the three matrices.
    """
    rows, inner, columns = np.broadcast_arrays(rows, inner, columns)
    speed = np.asarray(peak_flops(device, dtype) * device.matmul_share(dtype))
    products = 2.0 * rows * inner * columns
    if device.processors:
        lost = FIXED_DEPTH / (inner + FIXED_DEPTH)
        products = 2.0 * inner * _padded_area(device.processors, rows, columns) / (1 - lost)
        speed = speed * np.minimum(alignment(inner), alignment(columns))
    size = ITEMSIZE.get(dtype, 2)
    moved = size * (rows * inner + inner * columns) + max(size, 2) * rows * columns
    return np.asarray(np.maximum(products / speed, stream_seconds(device, moved)))


def _padded_area(processors: int, rows: Floats, columns: Floats) -> Floats:
    """Elements of the result that the processors spend time on, with the best of `TILES`."""
    best = np.full(np.shape(rows), np.inf)
    for height, width, share in TILES:
        tiles = np.ceil(rows / height) * np.ceil(columns / width)
        # Kernels split the inner dimension where tiles are few, so that a wave is dealt out in quarters.
        waves = np.ceil(4 * tiles / processors) / 4
        best = np.minimum(best, waves * processors * height * width / share)
    return best


def stream_seconds(device: Device, moved: Numbers) -> Floats:
    """Seconds to read and write `moved` bytes of the device's memory; 0 where its bandwidth is not known."""
    if not device.memory_bandwidth:
        return np.zeros_like(moved, dtype=np.float64)
    return np.asarray(moved / (device.memory_bandwidth * device.stream), np.float64)
