"""The jobs that fill the weight files of a Hugging Face folder from a model on disk."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path

from kumi.convert.rectangles import Dims, in_runs, is_run, overlap, place, seen, unit_rows
from kumi.convert.runs import Wrote
from kumi.convert.safetensors_file import Layout
from kumi.convert.stream import Bench, Job, Move, Reader, copy_job, write_at
from kumi.spec.ledger import tensors
from kumi.spec.model import ModelSpec
from kumi.spec.op import Param
from kumi.spec.precision import ITEMSIZE
from kumi.spec.weights import Part, Piece, files, parts


def jobs(folder: Path, shards: Mapping[str, Layout], spec: ModelSpec, reader: Reader) -> list[Job]:
    """One job for every native tensor that lies in runs of its files' tensors, and one for every other file tensor."""
    where = {name: (folder / file, layout) for file, layout in shards.items() for name in layout.shapes}
    scattered = {name for name, pieces in files(spec).items() if not all(in_runs(piece.part) for piece in pieces)}
    found = []
    for param in tensors(spec):
        own = [part for part in parts(spec, param) if part.name not in scattered]
        found += [_job(param, same, reader, file, layout) for same, file, layout in _by_file(own, where)]
    for name in scattered:
        found.append(_scattered_job(name, files(spec)[name], reader, *where[name]))
    return found


def _by_file(own: list[Part], where: Mapping[str, tuple[Path, Layout]]) -> Iterator[tuple[list[Part], Path, Layout]]:
    found: dict[Path, list[Part]] = {}
    for part in own:
        found.setdefault(where[part.name][0], []).append(part)
    for file, same in found.items():
        yield same, file, where[same[0].name][1]


def _job(param: Param, own: list[Part], reader: Reader, file: Path, layout: Layout) -> Job:
    """Return the job that writes the parts of `param` that are in `file`."""
    dtype, runs = layout.dtypes[own[0].name], reader.runs(param.name)
    if runs is None or not all(is_run(param.shape, part.extent) for part in own):
        return _rows_job(param, own, reader, file, layout)
    moves = []
    for part in own:
        offset = layout.offsets[part.name] + place(part.view, part.at) * ITEMSIZE[dtype]
        moves.append(Move(place(param.shape, part.start), prod(part.extent), offset))
    return copy_job(file, runs, moves, reader.dtypes[param.name], dtype)


def _rows_job(param: Param, own: list[Part], reader: Reader, file: Path, layout: Layout) -> Job:
    """Rows of `param` go from the buffer to the run of each part that has some of them."""
    dtype, rest = layout.dtypes[own[0].name], param.shape[1:]
    low, high = min(part.start[0] for part in own), max(part.start[0] + part.extent[0] for part in own)

    def work(handle: int, bench: Bench, wrote: Wrote) -> None:
        row = low
        while row < high:
            end = min(high, reader.cut(param.name, row))
            start, shape = (row, *(0,) * len(rest)), (end - row, *rest)
            data = bench.rows(reader, param.name, start, shape, dtype)
            for part in own:
                found = overlap(part.start, part.extent, start, shape)
                if found:
                    first, size = found
                    inside = tuple(slice(a - b, a - b + n) for a, b, n in zip(first, start, size))
                    offset = _offset(part, tuple(a - b for a, b in zip(first, part.start)), size)
                    write_at(handle, data[inside], layout.offsets[part.name] + offset * ITEMSIZE[dtype])
                    wrote(prod(size) * ITEMSIZE[dtype])
            row = end

    return Job(file, sum(prod(part.size) for part in own) * ITEMSIZE[dtype], work)


def _offset(part: Part, offsets: Dims, size: Dims) -> int:
    """The number of the first element, in the file's tensor."""
    return place(part.view, seen(part, offsets, size).at)


def _scattered_job(name: str, pieces: tuple[Piece, ...], reader: Reader, file: Path, layout: Layout) -> Job:
    """The whole tensor is copied where the source's files have it, too; else it is put together in memory, from a few
    rows of every native one at a time."""
    shape, dtype = layout.shapes[name], layout.dtypes[name]
    run = reader.file_run(name, shape, dtype)
    if run is not None:
        return copy_job(file, lambda: [run], [Move(0, prod(shape), layout.offsets[name])], dtype, dtype)

    def work(handle: int, bench: Bench, wrote: Wrote) -> None:
        whole = bench.take("whole", shape, dtype)
        for piece in pieces:
            part, target = piece.part, whole.view(piece.part.view)
            row, unit = 0, unit_rows(part)
            while row < part.extent[0]:
                cut = reader.cut(piece.param.name, part.start[0] + row) - part.start[0]
                end = min(part.extent[0], -(-cut // unit) * unit)
                size = (end - row, *part.extent[1:])
                start = (part.start[0] + row, *part.start[1:])
                data = bench.rows(reader, piece.param.name, start, size, reader.dtypes[piece.param.name])
                found = seen(part, (row, *(0,) * (len(size) - 1)), size)
                inside = target[tuple(slice(low, low + count) for low, count in zip(found.at, found.size))]
                ordered = inside.permute(part.order)
                ordered.copy_(data.view(ordered.shape))
                row = end
        write_at(handle, whole, layout.offsets[name])
        wrote(prod(shape) * ITEMSIZE[dtype])

    return Job(file, prod(shape) * ITEMSIZE[dtype], work, whole=True)
