"""Write a safetensors file one tensor at a time, in any order: the header comes first, from shapes and dtypes.

The format is an 8-byte little-endian header length, a JSON header (name -> dtype, shape, offsets), and the raw data.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from kumi.spec.precision import ITEMSIZE
from kumi.spec.weights import Part

if TYPE_CHECKING:
    from torch import Tensor

# Dtypes by torch's names, and the format's names of them.
NAMES = {"float64": "F64", "float32": "F32", "bfloat16": "BF16", "float16": "F16"}


@dataclass(frozen=True)
class Layout:
    """The layout of a file: its header and total size in bytes, and each tensor's byte offset, dtype and shape."""

    header: bytes
    offsets: Mapping[str, int]
    dtypes: Mapping[str, str]
    shapes: Mapping[str, tuple[int, ...]]
    size: int


def lay_out(shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, str]) -> Layout:
    """Return the layout of a file with these tensors in this order, with the metadata {"format": "pt"}."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset, offsets = 0, {}
    for name, shape in shapes.items():
        offsets[name] = offset
        end = offset + prod(shape) * ITEMSIZE[dtypes[name]]
        entries[name] = {"dtype": NAMES[dtypes[name]], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    # Padding keeps the data aligned for readers that map the file into memory.
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return Layout(
        header, {k: v + len(header) for k, v in offsets.items()}, dict(dtypes), dict(shapes), len(header) + offset
    )


def create(path: Path, layout: Layout) -> None:
    """Create the file with its header and its full size."""
    with path.open("wb") as file:
        file.write(layout.header)
        file.truncate(layout.size)


def put(path: Path, layout: Layout, part: Part, tensor: Tensor) -> None:
    """Write `tensor` to the place of `part` in the file, cast to the dtype in `layout`.

    `tensor` has the elements of `part`, a rectangle of a native tensor: a tensor with kumi's name and shape.
    """
    import numpy as np
    import torch

    assert tuple(tensor.shape) == part.extent, f"{part.name}: {tuple(tensor.shape)} != {part.extent}"
    assert part.shape == layout.shapes[part.name], f"{part.name}: {part.shape} != {layout.shapes[part.name]}"
    data = tensor.detach().to("cpu", getattr(torch, layout.dtypes[part.name])).contiguous()
    offset = layout.offsets[part.name]
    if part.is_whole:
        with path.open("r+b") as file:
            file.seek(offset)
            file.write(data.flatten().view(torch.uint8).numpy().data)
        return
    # NumPy has no bfloat16, so elements are written as integers of the same bits.
    bits = data.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[data.element_size()])
    permuted = [part.size[dim] for dim in part.order]
    bits = bits.reshape(permuted).permute([part.order.index(dim) for dim in range(len(permuted))])
    target = np.memmap(path, dtype=bits.numpy().dtype, mode="r+", offset=offset, shape=part.view)
    target[tuple(slice(a, a + n) for a, n in zip(part.at, part.size, strict=True))] = bits.numpy()
    target.flush()


def sync(path: Path) -> None:
    """Flush the file or folder `path` to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
