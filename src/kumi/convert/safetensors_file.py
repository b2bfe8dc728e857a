"""Writing a safetensors file a tensor at a time, in any order: the header is laid out before the data are there.

The format is an 8-byte little-endian header length, a JSON header (name -> dtype, shape, offsets), and the raw data.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from kumi.spec.precision import ITEMSIZE

NAMES = {"float64": "F64", "float32": "F32", "bfloat16": "BF16", "float16": "F16"}


@dataclass(frozen=True)
class Layout:
    """Where each tensor of a file goes: its byte offset, dtype and shape; and the bytes of header and file."""

    header: bytes
    offsets: Mapping[str, int]
    dtypes: Mapping[str, str]
    shapes: Mapping[str, tuple[int, ...]]
    size: int


def lay_out(shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, str]) -> Layout:
    """The layout of a file with these tensors, in this order, marked as PyTorch's."""
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


def put(path: Path, layout: Layout, name: str, tensor: Tensor) -> None:
    """Write `tensor`, cast to its dtype in `layout`, to its place."""
    assert tuple(tensor.shape) == layout.shapes[name], f"{name}: {tuple(tensor.shape)} != {layout.shapes[name]}"
    data = tensor.detach().to("cpu", getattr(torch, layout.dtypes[name])).contiguous()
    with path.open("r+b") as file:
        file.seek(layout.offsets[name])
        file.write(data.flatten().view(torch.uint8).numpy().data)


def sync(path: Path) -> None:
    """Return when the file or folder `path` is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
