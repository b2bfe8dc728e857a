"""Which rectangle of a file's tensor holds a rectangle of a native one, and which rectangles are one run of bytes."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from kumi.spec.weights import Part

Dims = tuple[int, ...]


@dataclass(frozen=True)
class Seen:
    """A rectangle of a file's tensor, seen as a part's `view`: `size` elements from `at` on.

    With its dims in the part's order, it is the rectangle of `shape` of the native tensor, of which what was asked for
    begins at `skip`: where several dims of the file are one here, it can be more than was asked for.
    """

    at: Dims
    size: Dims
    shape: Dims
    skip: Dims


def seen(part: Part, offsets: Dims, shape: Dims) -> Seen:
    """Where the file has the elements of `part` from `offsets` on (counted from its start), as many as `shape` says."""
    at, size = list(part.at), list(part.size)
    wide, skip = [], []
    for dims, whole, low, count in zip(merged(part), part.extent, offsets, shape, strict=True):
        outer = next((dim for dim in dims if part.size[dim] > 1), None)
        if outer is None:
            wide.append(whole)
            skip.append(0)
            continue
        inner = whole // part.size[outer]
        first, end = low // inner, -(-(low + count) // inner)
        at[outer], size[outer] = part.at[outer] + first, end - first
        wide.append((end - first) * inner)
        skip.append(low - first * inner)
    return Seen(tuple(at), tuple(size), tuple(wide), tuple(skip))


def merged(part: Part) -> tuple[Dims, ...]:
    """Of every native dim the dims of the file's view that it is made of, the outermost first."""
    left, found = list(part.order), []
    for whole in part.extent:
        dims, have = [], 1
        while left and (have < whole or part.size[left[0]] == 1):
            dims.append(left.pop(0))
            have *= part.size[dims[-1]]
        assert have == whole, f"{part.name}: the dims {part.size} in the order {part.order} are no {part.extent}"
        found.append(tuple(dims))
    assert not left, f"{part.name}: the dims {part.size} in the order {part.order} are no {part.extent}"
    return tuple(found)


def unit_rows(part: Part) -> int:
    """Native rows that can only be found together in the file: a range of whole units is a rectangle there."""
    outer = next((dim for dim in merged(part)[0] if part.size[dim] > 1), None)
    return part.extent[0] if outer is None else part.extent[0] // part.size[outer]


def by_rows(part: Part) -> bool:
    """Whether a range of native rows is near each other in the file, so that it can be read a few rows at a time."""
    dims = [dim for dim in merged(part)[0] if part.size[dim] > 1]
    return not dims or all(part.size[dim] == 1 for dim in range(dims[0]))


def strides(view: Dims) -> Dims:
    """Of every dim of a row-major tensor, how many elements apart its neighbours are."""
    return tuple(prod(view[dim + 1 :]) for dim in range(len(view)))


def is_run(view: Dims, size: Dims) -> bool:
    """Whether a rectangle of `size` is one run of consecutive elements of a row-major tensor of the shape `view`."""
    wide = [dim for dim, count in enumerate(size) if count > 1]
    return not wide or size[wide[0] + 1 :] == view[wide[0] + 1 :]


def in_runs(part: Part) -> bool:
    """Whether any rows of the native tensor are a run of the file's tensor, once rows are complete."""
    return part.in_order and is_run(part.view, part.size)


def place(view: Dims, at: Dims) -> int:
    """The number of the element `at` of a row-major tensor of the shape `view`."""
    return sum(low * step for low, step in zip(at, strides(view)))


def overlap(start: Dims, extent: Dims, other: Dims, shape: Dims) -> tuple[Dims, Dims] | None:
    """Start and shape of what two rectangles have in common; None where that is nothing."""
    first = tuple(map(max, start, other))
    size = tuple(min(a + n, b + m) - low for a, n, b, m, low in zip(start, extent, other, shape, first))
    return (first, size) if all(count > 0 for count in size) else None
