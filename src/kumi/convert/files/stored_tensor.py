"""A tensor in a weight file, and reading some of its elements directly into memory.

A native tensor has kumi's name and shape. A `Part` is a rectangle of a native tensor and its place in a file's tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from kumi.convert.files.byte_runs import Run, open_weight_file, plain_run, read_all
from kumi.convert.files.safetensors_read import Span
from kumi.convert.files.slices import Dims, file_slice, flat_index, is_contiguous, rows_are_contiguous, strides
from kumi.errors import ModelError
from kumi.spec.precision import ITEMSIZE
from kumi.spec.weights import Part
from kumi.storage.write import as_bytes

if TYPE_CHECKING:
    from torch import Tensor

# Supported dtypes of weights: safetensors' name to torch's.
DTYPES = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}

# Bytes of a block of rows, and bytes of the buffer for strided reads, which also read the gaps between rows.
BLOCK_BYTES, GAPPED_BYTES = 4 * 2**20, 2**20


@dataclass(frozen=True)
class Entry:
    """A stored tensor; its data are read on demand.

    dtype     torch's name
    offset    first byte of the data in the file
    decode    for a quantized tensor: returns rows [low, high), dequantized from the tensors in the file
    """

    file: Path
    name: str
    shape: Dims
    dtype: str
    offset: int
    decode: Callable[[int, int], Tensor] | None = None


def entry_of(span: Span) -> Entry:
    """Return the entry of an unquantized tensor; raise ModelError unless its dtype is supported."""
    dtype = DTYPES.get(span.dtype)
    if dtype is None:
        raise ModelError(
            f"{span.file}: {span.name!r} has dtype {span.dtype}, and kumi reads {', '.join(DTYPES)} only; "
            f"export the model without quantization"
        )
    return Entry(span.file, span.name, span.shape, dtype, span.offset)


def read_entry(entry: Entry) -> Tensor:
    """Return a stored tensor."""
    import torch

    out = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
    read_run(entry, 0, out)
    return out


def read_run(entry: Entry, first: int, out: Tensor) -> None:
    """Fill `out` (contiguous, of the entry's dtype) with consecutive elements, which begin at index `first`."""
    if entry.decode is not None:
        row = max(1, prod(entry.shape[1:]))
        low, high = first // row, -(-(first + out.numel()) // row)
        skip = first - low * row
        out.view(-1).copy_(entry.decode(low, high).reshape(-1)[skip : skip + out.numel()])
        return
    read_bytes(entry.file, as_bytes(out), entry.offset + first * out.element_size())


def read_bytes(file: Path, view: memoryview, offset: int) -> None:
    """Fill `view` with the bytes at `offset` of `file`; raise ModelError if the file ends early."""
    with open_weight_file(file) as handle:
        read_all(handle, view, offset, file)


def run_of(entry: Entry, part: Part) -> Run | None:
    """Return the byte range with the elements of `part`.

    None if the elements are quantized, not contiguous in the file, or in another order than in the native tensor.
    """
    if entry.decode is not None or not rows_are_contiguous(part):
        return None
    itemsize = ITEMSIZE[entry.dtype]
    return plain_run(entry.file, entry.offset + flat_index(part.view, part.at) * itemsize, prod(part.size) * itemsize)


def read_part(entry: Entry, part: Part, offsets: Dims, out: Tensor) -> None:
    """Fill `out` (any strides) with the elements of `part` that begin at `offsets`, relative to the part's start."""
    import torch

    rectangle = file_slice(part, offsets, tuple(out.shape))
    if rectangle.shape != tuple(out.shape):
        superset = torch.empty(rectangle.shape, dtype=out.dtype)
        _read_rectangle(entry, part, rectangle.at, rectangle.size, superset)
        out.copy_(superset[tuple(slice(low, low + count) for low, count in zip(rectangle.skip, out.shape))])
    else:
        _read_rectangle(entry, part, rectangle.at, rectangle.size, out)


def in_view(part: Part, size: Dims, native: Tensor) -> Tensor:
    """Return `native`, a contiguous slice of the native tensor, as a view with the dims of the file: shape `size`."""
    inverse = sorted(range(len(part.order)), key=lambda dim: part.order[dim])
    return native.view([size[dim] for dim in part.order]).permute(inverse)


def _read_rectangle(entry: Entry, part: Part, at: Dims, size: Dims, out: Tensor) -> None:
    """Fill `out` with the slice of the file's tensor, viewed as `part.view`, that begins at `at` with shape `size`."""
    import torch

    target = in_view(part, size, out)
    if target.numel() == 0:
        return
    if is_contiguous(part.view, size) and target.is_contiguous():
        read_run(entry, flat_index(part.view, at), target)
        return
    steps = strides(part.view)
    dim = next((dim for dim, count in enumerate(size) if count > 1), 0)
    span = steps[dim] * out.element_size()
    chunk = min(size[dim], max(1, GAPPED_BYTES // span))
    if dim and entry.decode is not None:
        chunk = size[dim]  # each row is decoded once
    buffer = torch.empty(min(chunk * steps[dim], prod(part.view)), dtype=out.dtype)
    for low in range(0, size[dim], chunk):
        count = min(chunk, size[dim] - low)
        corner = (*at[:dim], at[dim] + low, *at[dim + 1 :])
        shape = (*size[:dim], count, *size[dim + 1 :])
        # Read from the first needed element to the last, including the gaps between them.
        length = flat_index(part.view, tuple(n - 1 for n in shape)) + 1
        read_run(entry, flat_index(part.view, corner), buffer[:length])
        target.narrow(dim, low, count).copy_(buffer.as_strided(shape, steps))
