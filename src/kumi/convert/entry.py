"""A tensor in a weight file, and reading some of its elements straight into memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from kumi.convert.rectangles import Dims, in_runs, is_run, place, seen, strides
from kumi.convert.runs import Run, opened, plain_run, read_all
from kumi.convert.safetensors_read import Span
from kumi.errors import ModelError
from kumi.spec.precision import ITEMSIZE
from kumi.spec.weights import Part
from kumi.storage.write import as_bytes

if TYPE_CHECKING:
    from torch import Tensor

# safetensors' names of the dtypes that weights may have, and torch's.
DTYPES = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}

# Bytes of rows read at a time, and those that pass through a buffer of their own because what lies between comes along.
BLOCK_BYTES, GAPPED_BYTES = 4 * 2**20, 2**20


@dataclass(frozen=True)
class Entry:
    """A stored tensor: its file, shape and dtype (torch's name). Its data are read when asked for.

    They begin at byte `offset` of the file; with `decode`, which returns rows [low, high) of the tensor, they are made
    from other tensors there.
    """

    file: Path
    name: str
    shape: Dims
    dtype: str
    offset: int
    decode: Callable[[int, int], Tensor] | None = None


def entry_of(span: Span) -> Entry:
    """A tensor that is stored as it is; ModelError where its dtype is none of weights."""
    dtype = DTYPES.get(span.dtype)
    if dtype is None:
        raise ModelError(
            f"{span.file}: {span.name!r} has dtype {span.dtype}; kumi reads {', '.join(DTYPES)}: "
            f"export the model without quantisation"
        )
    return Entry(span.file, span.name, span.shape, dtype, span.offset)


def read_entry(entry: Entry) -> Tensor:
    """All of a stored tensor."""
    import torch

    out = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
    read_run(entry, 0, out)
    return out


def read_run(entry: Entry, first: int, out: Tensor) -> None:
    """Fill `out`, contiguous and of the entry's dtype, with its elements from number `first` on."""
    if entry.decode is not None:
        row = max(1, prod(entry.shape[1:]))
        low, high = first // row, -(-(first + out.numel()) // row)
        skip = first - low * row
        out.view(-1).copy_(entry.decode(low, high).reshape(-1)[skip : skip + out.numel()])
        return
    read_bytes(entry.file, as_bytes(out), entry.offset + first * out.element_size())


def read_bytes(file: Path, view: memoryview, offset: int) -> None:
    """Fill `view` with the bytes of `file` from `offset` on; ModelError where the file ends before."""
    with opened(file) as handle:
        read_all(handle, view, offset, file)


def run_of(entry: Entry, part: Part) -> Run | None:
    """Return the bytes of the elements of `part`; None where they do not lie in the file one after the other, in the
    order that the native tensor has, or are made of others."""
    if entry.decode is not None or not in_runs(part):
        return None
    itemsize = ITEMSIZE[entry.dtype]
    return plain_run(entry.file, entry.offset + place(part.view, part.at) * itemsize, prod(part.size) * itemsize)


def read_part(entry: Entry, part: Part, offsets: Dims, out: Tensor) -> None:
    """Fill `out` (any strides) with the elements of `part`, from `offsets` (counted from its start) on."""
    import torch

    found = seen(part, offsets, tuple(out.shape))
    if found.shape != tuple(out.shape):
        wide = torch.empty(found.shape, dtype=out.dtype)
        _read_rectangle(entry, part, found.at, found.size, wide)
        out.copy_(wide[tuple(slice(low, low + count) for low, count in zip(found.skip, out.shape))])
    else:
        _read_rectangle(entry, part, found.at, found.size, out)


def in_view(part: Part, size: Dims, native: Tensor) -> Tensor:
    """The memory of `native`, a rectangle of the native tensor, with the dims of the file's view: of shape `size`."""
    inverse = sorted(range(len(part.order)), key=lambda dim: part.order[dim])
    return native.view([size[dim] for dim in part.order]).permute(inverse)


def _read_rectangle(entry: Entry, part: Part, at: Dims, size: Dims, out: Tensor) -> None:
    import torch

    target = in_view(part, size, out)
    if target.numel() == 0:
        return
    if is_run(part.view, size) and target.is_contiguous():
        read_run(entry, place(part.view, at), target)
        return
    steps = strides(part.view)
    dim = next((dim for dim, count in enumerate(size) if count > 1), 0)
    span = steps[dim] * out.element_size()
    chunk = min(size[dim], max(1, GAPPED_BYTES // span))
    if dim and entry.decode is not None:
        chunk = size[dim]  # a row is decoded as a whole, and once
    buffer = torch.empty(min(chunk * steps[dim], prod(part.view)), dtype=out.dtype)
    for low in range(0, size[dim], chunk):
        count = min(chunk, size[dim] - low)
        corner = (*at[:dim], at[dim] + low, *at[dim + 1 :])
        shape = (*size[:dim], count, *size[dim + 1 :])
        # From the first element wanted to the last: whatever lies between comes along.
        length = place(part.view, tuple(n - 1 for n in shape)) + 1
        read_run(entry, place(part.view, corner), buffer[:length])
        target.narrow(dim, low, count).copy_(buffer.as_strided(shape, steps))
