"""Jobs that fill the weight files of a Hugging Face folder from a model on disk.

A native tensor has kumi's name and shape, a file tensor those of transformers. A `Part` is a rectangle of a native
tensor and its place in a file tensor. A file tensor is scattered if the rows of one of its native tensors are not
contiguous in it, because they are transposed or interleaved.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path

from kumi.convert.files.byte_runs import Wrote
from kumi.convert.files.safetensors_write import Layout
from kumi.convert.files.slices import (
    Dims,
    file_slice,
    flat_index,
    is_contiguous,
    overlap,
    rows_are_contiguous,
    rows_per_file_index,
)
from kumi.convert.files.stream import Job, Move, Reader, ThreadBuffers, copy_job, write_at
from kumi.spec.ledger import tensors
from kumi.spec.model import ModelSpec
from kumi.spec.op import Param
from kumi.spec.precision import ITEMSIZE
from kumi.spec.weights import ParamPart, Part, stored_parts, stored_tensors


def jobs(folder: Path, shards: Mapping[str, Layout], spec: ModelSpec, reader: Reader) -> list[Job]:
    """Return the jobs that write the tensors of `spec` into the files `shards`, by name, of `folder`.

    Each scattered file tensor is written by one job. The other file tensors are written native tensor by native tensor:
    one job for each file in which a native tensor has parts.
    """
    location = {name: (folder / file, layout) for file, layout in shards.items() for name in layout.shapes}
    scattered = {
        name
        for name, pieces in stored_tensors(spec).items()
        if not all(rows_are_contiguous(piece.part) for piece in pieces)
    }
    result = []
    for param in tensors(spec):
        param_parts = [part for part in stored_parts(spec, param) if part.name not in scattered]
        result += [
            _param_job(param, parts_in_file, reader, file, layout)
            for parts_in_file, file, layout in _group_by_file(param_parts, location)
        ]
    for name in scattered:
        result.append(_scattered_job(name, stored_tensors(spec)[name], reader, *location[name]))
    return result


def _group_by_file(
    param_parts: list[Part], location: Mapping[str, tuple[Path, Layout]]
) -> Iterator[tuple[list[Part], Path, Layout]]:
    """Yield the parts that go into each file, the file, and its layout."""
    by_file: dict[Path, list[Part]] = {}
    for part in param_parts:
        by_file.setdefault(location[part.name][0], []).append(part)
    for file, parts_in_file in by_file.items():
        yield parts_in_file, file, location[parts_in_file[0].name][1]


def _param_job(param: Param, param_parts: list[Part], reader: Reader, file: Path, layout: Layout) -> Job:
    """Return the job that writes `param_parts`, the parts of `param` in `file`."""
    dtype, runs = layout.dtypes[param_parts[0].name], reader.runs(param.name)
    if runs is None or not all(is_contiguous(param.shape, part.extent) for part in param_parts):
        return _rows_job(param, param_parts, reader, file, layout)
    moves = []
    for part in param_parts:
        offset = layout.offsets[part.name] + flat_index(part.view, part.at) * ITEMSIZE[dtype]
        moves.append(Move(flat_index(param.shape, part.start), prod(part.extent), offset))
    return copy_job(file, runs, moves, reader.dtypes[param.name], dtype)


def _rows_job(param: Param, param_parts: list[Part], reader: Reader, file: Path, layout: Layout) -> Job:
    """Return the job that reads blocks of rows of `param` and writes the rows of each part."""
    dtype, rest = layout.dtypes[param_parts[0].name], param.shape[1:]
    low, high = min(part.start[0] for part in param_parts), max(part.start[0] + part.extent[0] for part in param_parts)

    def work(handle: int, buffers: ThreadBuffers, wrote: Wrote) -> None:
        row = low
        while row < high:
            end = min(high, reader.block_end(param.name, row))
            start, shape = (row, *(0,) * len(rest)), (end - row, *rest)
            data = buffers.rows(reader, param.name, start, shape, dtype)
            for part in param_parts:
                common = overlap(part.start, part.extent, start, shape)
                if common:
                    first, size = common
                    inside = tuple(slice(a - b, a - b + n) for a, b, n in zip(first, start, size))
                    offset = _offset(part, tuple(a - b for a, b in zip(first, part.start)), size)
                    write_at(handle, data[inside], layout.offsets[part.name] + offset * ITEMSIZE[dtype])
                    wrote(prod(size) * ITEMSIZE[dtype])
            row = end

    return Job(file, sum(prod(part.size) for part in param_parts) * ITEMSIZE[dtype], work)


def _offset(part: Part, offsets: Dims, size: Dims) -> int:
    """Return the index, in the flattened file tensor, of the first element of the slice of `part` at `offsets`."""
    return flat_index(part.view, file_slice(part, offsets, size).at)


def _scattered_job(name: str, pieces: tuple[ParamPart, ...], reader: Reader, file: Path, layout: Layout) -> Job:
    """Return the job that writes the scattered file tensor `name`, which is made of the parts `pieces`.

    The job copies the tensor if the source's files have it, else assembles it in memory from blocks of native rows.
    """
    shape, dtype = layout.shapes[name], layout.dtypes[name]
    run = reader.file_run(name, shape, dtype)
    if run is not None:
        return copy_job(file, lambda: [run], [Move(0, prod(shape), layout.offsets[name])], dtype, dtype)

    def work(handle: int, buffers: ThreadBuffers, wrote: Wrote) -> None:
        assembled = buffers.take("whole", shape, dtype)
        for piece in pieces:
            part, target = piece.part, assembled.view(piece.part.view)
            row, row_group = 0, rows_per_file_index(part)
            while row < part.extent[0]:
                block_end = reader.block_end(piece.param.name, part.start[0] + row) - part.start[0]
                end = min(part.extent[0], -(-block_end // row_group) * row_group)
                size = (end - row, *part.extent[1:])
                start = (part.start[0] + row, *part.start[1:])
                data = buffers.rows(reader, piece.param.name, start, size, reader.dtypes[piece.param.name])
                rectangle = file_slice(part, (row, *(0,) * (len(size) - 1)), size)
                region = target[tuple(slice(low, low + count) for low, count in zip(rectangle.at, rectangle.size))]
                ordered = region.permute(part.order)
                ordered.copy_(data.view(ordered.shape))
                row = end
        write_at(handle, assembled, layout.offsets[name])
        wrote(prod(shape) * ITEMSIZE[dtype])

    return Job(file, prod(shape) * ITEMSIZE[dtype], work, whole=True)
