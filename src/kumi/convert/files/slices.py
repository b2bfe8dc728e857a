"""Map slices of native tensors to slices of file tensors, and tell which slices are contiguous.

A native tensor has kumi's name and shape, a file tensor those that the file gives it. A `Part` is a rectangle of a
native tensor and its place in a file tensor. Its `view` is the shape as which the file tensor is viewed; its `order` is
the permutation of the view's dims that puts the elements in native order.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from kumi.spec.weights import Part

Dims = tuple[int, ...]


@dataclass(frozen=True)
class FileSlice:
    """A slice of a file tensor, viewed with the shape of a part's `view`.

    at      start of the slice in the view
    size    shape of the slice in the view
    shape   shape of the slice in native dims, after permuting the dims of the view into the part's order
    skip    start of the requested elements within the slice, in native dims

    If the file splits a native dim into several, the slice can have more elements than were requested.
    """

    at: Dims
    size: Dims
    shape: Dims
    skip: Dims


def file_slice(part: Part, offsets: Dims, shape: Dims) -> FileSlice:
    """Return the slice of the file tensor that contains a slice of `part`: from `offsets` to `offsets` + `shape`."""
    at, size = list(part.at), list(part.size)
    native_shape, skip = [], []
    for dims, extent, offset, count in zip(file_dims(part), part.extent, offsets, shape, strict=True):
        # The outermost of the file's dims that form the native dim; `inner` native indices share one index of it.
        outer = next((dim for dim in dims if part.size[dim] > 1), None)
        if outer is None:
            native_shape.append(extent)
            skip.append(0)
            continue
        inner = extent // part.size[outer]
        first_outer, end_outer = offset // inner, -(-(offset + count) // inner)
        at[outer], size[outer] = part.at[outer] + first_outer, end_outer - first_outer
        native_shape.append((end_outer - first_outer) * inner)
        skip.append(offset - first_outer * inner)
    return FileSlice(tuple(at), tuple(size), tuple(native_shape), tuple(skip))


def file_dims(part: Part) -> tuple[Dims, ...]:
    """Return, for each native dim, the dims of the file's view that form it, the outermost first."""
    remaining, result = list(part.order), []
    for extent in part.extent:
        dims, numel = [], 1
        while remaining and (numel < extent or part.size[remaining[0]] == 1):
            dims.append(remaining.pop(0))
            numel *= part.size[dims[-1]]
        assert numel == extent, f"{part.name}: the dims {part.size} in the order {part.order} do not form {part.extent}"
        result.append(tuple(dims))
    assert not remaining, f"{part.name}: the dims {part.size} in the order {part.order} do not form {part.extent}"
    return tuple(result)


def rows_per_file_index(part: Part) -> int:
    """Return how many native rows share one index of the file's dim of rows, or of the outermost one if it has several.

    A block of native rows that begins and ends at multiples of this number is a slice of the file tensor.
    """
    outer = next((dim for dim in file_dims(part)[0] if part.size[dim] > 1), None)
    return part.extent[0] if outer is None else part.extent[0] // part.size[outer]


def rows_are_close(part: Part) -> bool:
    """True if a range of native rows is one region of the file, so that a few rows at a time can be read."""
    dims = [dim for dim in file_dims(part)[0] if part.size[dim] > 1]
    return not dims or all(part.size[dim] == 1 for dim in range(dims[0]))


def strides(view: Dims) -> Dims:
    """Return the strides, in elements, of a row-major tensor of shape `view`."""
    return tuple(prod(view[dim + 1 :]) for dim in range(len(view)))


def is_contiguous(view: Dims, size: Dims) -> bool:
    """True if a slice of shape `size` is contiguous in a row-major tensor of shape `view`."""
    long_dims = [dim for dim, count in enumerate(size) if count > 1]
    return not long_dims or size[long_dims[0] + 1 :] == view[long_dims[0] + 1 :]


def rows_are_contiguous(part: Part) -> bool:
    """True if every range of native rows of `part` is contiguous in the file, in native order."""
    return part.in_order and is_contiguous(part.view, part.size)


def flat_index(view: Dims, at: Dims) -> int:
    """Return the index of the element `at` in the flattened row-major tensor of shape `view`."""
    return sum(index * stride for index, stride in zip(at, strides(view)))


def overlap(start: Dims, extent: Dims, other: Dims, shape: Dims) -> tuple[Dims, Dims] | None:
    """Return start and shape of the intersection of two slices; None if it is empty.

    One slice begins at `start` with the shape `extent`, the other begins at `other` with the shape `shape`.
    """
    first = tuple(map(max, start, other))
    size = tuple(min(a + n, b + m) - low for a, n, b, m, low in zip(start, extent, other, shape, first))
    return (first, size) if all(count > 0 for count in size) else None
