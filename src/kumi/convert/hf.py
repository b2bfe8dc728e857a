"""Hugging Face model folders: reading them strictly, and the one place to write them from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from kumi.convert.card import model_card
from kumi.convert.carried import is_carried
from kumi.convert.entry import BLOCK_BYTES, Entry, entry_of, read_part, run_of
from kumi.convert.hf_write import write
from kumi.convert.rectangles import Dims, by_rows, is_run, overlap, place
from kumi.convert.runs import Run, plain_run
from kumi.convert.safetensors_read import tensors_of as spans_of
from kumi.convert.stream import Reader, Runs
from kumi.errors import ModelError
from kumi.spec.families import quantised, read_config
from kumi.spec.ledger import EMBEDDING, HEAD
from kumi.spec.ledger import tensors as tensors_of
from kumi.spec.model import ModelSpec
from kumi.spec.op import Param
from kumi.spec.precision import ITEMSIZE
from kumi.spec.weights import Part, parts, stored_name

if TYPE_CHECKING:  # bytes are copied without torch, which takes seconds to import
    from torch import Tensor

__all__ = ["Entry", "Stored", "check", "entries", "model_card", "read", "read_into", "write"]


@dataclass(frozen=True)
class Stored:
    """A tensor of a model: its shape and dtype, and the parts of it that files hold."""

    shape: tuple[int, ...]
    dtype: str
    parts: tuple[tuple[Part, Entry], ...]


def entries(folder: str | Path, spec: ModelSpec | None = None) -> dict[str, Entry]:
    """Every tensor of the safetensors file or files in `folder`, by name; nothing but headers is read.

    Quantised ones are what they stand for. With `spec`, what such a model carries along is left out.
    """
    folder = Path(folder)
    spans = spans_of(folder)
    kept = {name: span for name, span in spans.items() if spec is None or not is_carried(spec, name)}
    found = quantised.method(read_config(folder)) if (folder / "config.json").exists() else None
    if found is None:
        return {name: entry_of(span) for name, span in kept.items()}
    from kumi.convert import dequantise

    return dequantise.entries(folder, kept, found)


def read(stored: Stored, start: Dims | None = None, shape: Dims | None = None) -> Tensor:
    """The tensor `stored`, or its part of `shape` from the indices `start` on; nothing else is read."""
    import torch

    out = torch.empty(stored.shape if shape is None else shape, dtype=getattr(torch, stored.dtype))
    read_into(stored, (0,) * len(stored.shape) if start is None else start, out)
    return out


def read_into(stored: Stored, start: Dims, out: Tensor) -> None:
    """Fill `out` (of the stored dtype, with any strides) with what `stored` has from the indices `start` on."""
    for part, entry in stored.parts:
        found = overlap(part.start, part.extent, start, tuple(out.shape))
        if found:
            first, shape = found
            inside = tuple(slice(a - b, a - b + n) for a, b, n in zip(first, start, shape))
            read_part(entry, part, tuple(a - b for a, b in zip(first, part.start)), out[inside])


def next_cut(stored: Stored, row: int) -> int:
    """The row before which to stop when rows of `stored` are read in blocks and `row` is the next: each is near the
    others in its file, so that none is read twice."""
    rows = stored.shape[0] if stored.shape else 1
    if not all(by_rows(part) for part, _ in stored.parts):
        return rows
    row_bytes = max(1, prod(stored.shape[1:])) * ITEMSIZE[stored.dtype]
    return min(rows, row + max(1, BLOCK_BYTES // row_bytes))


def runs(stored: Stored) -> Runs | None:
    """The runs of bytes that are all of `stored`, in the order of its elements; None where it is made otherwise."""
    found: list[Run] = []
    end = 0
    for part, entry in sorted(stored.parts, key=lambda one: place(stored.shape, one[0].start)):
        run = run_of(entry, part)
        if run is None or not is_run(stored.shape, part.extent) or place(stored.shape, part.start) != end:
            return None
        found.append(run)
        end += prod(part.extent)
    return found.copy if end == prod(stored.shape) else None


def reader(stored: Mapping[str, Stored]) -> Reader:
    """The same, for all tensors of a model, by name."""
    files = {part.name: entry for one in stored.values() for part, entry in one.parts}

    def file_run(name: str, shape: Dims, dtype: str) -> Run | None:
        entry = files.get(name)
        if entry is None or entry.decode is not None or (entry.shape, entry.dtype) != (shape, dtype):
            return None
        return plain_run(entry.file, entry.offset, prod(shape) * ITEMSIZE[dtype])

    return Reader(
        {name: one.dtype for name, one in stored.items()},
        lambda name, start, out: read_into(stored[name], start, out),
        lambda name, row: next_cut(stored[name], row),
        lambda name: runs(stored[name]),
        file_run,
    )


def check(folder: str | Path, spec: ModelSpec) -> dict[str, Stored]:
    """Where every tensor of `spec` is stored, once it is sure that `folder` holds exactly these.

    ModelError for a tensor that is missing, unknown or of another shape. Accepted besides: the rotary tables that old
    versions of transformers saved, a copy of the tied embedding, and what is carried along.
    """
    stored, head = check_headers(folder, spec), entries(folder, spec).get(stored_name(spec, HEAD))
    if spec.tie_word_embeddings and head is not None:
        copy = Stored(head.shape, head.dtype, ((_whole(head), head),))
        if copy.dtype != stored[EMBEDDING].dtype or not _equal(copy, stored[EMBEDDING]):
            raise _untied(spec, head)
    return stored


def _whole(entry: Entry) -> Part:
    zeros = (0,) * len(entry.shape)
    return Part(entry.name, entry.shape, zeros, entry.shape, entry.shape, zeros, entry.shape, (*range(len(zeros)),))


def _equal(one: Stored, other: Stored) -> bool:
    """Whether two tensors of one shape and dtype have the same values, compared a few rows at a time."""
    row, rest = 0, (0,) * (len(one.shape) - 1)
    while row < one.shape[0]:
        end = next_cut(one, row)
        shape = (end - row, *one.shape[1:])
        if not read(one, (row, *rest), shape).equal(read(other, (row, *rest), shape)):
            return False
        row = end
    return True


def _untied(spec: ModelSpec, head: Entry) -> ModelError:
    return ModelError(
        f"{head.file}: {head.name!r} differs from {stored_name(spec, EMBEDDING)!r}, but config.json ties "
        f"them; set tie_word_embeddings to false"
    )


def check_headers(folder: str | Path, spec: ModelSpec) -> dict[str, Stored]:
    """Where every tensor of `spec` is stored, once it is sure that the names and shapes in `folder` are those of
    `spec`; no tensor is read."""
    found = _with_base(spec, entries(folder, spec))
    stored = {param.name: _stored(folder, spec, param, found) for param in tensors_of(spec)}
    wanted = {part.name: part.shape for one in stored.values() for part, _ in one.parts}
    for name in found.keys() - wanted.keys():
        if name.endswith(spec.weights.ignored):
            continue
        if name != stored_name(spec, HEAD) or not spec.tie_word_embeddings:
            raise ModelError(
                f"{found[name].file}: {name!r} {found[name].shape} has no place in the {spec.family} "
                f"model of this config.json; kumi would drop it"
            )
        if found[name].shape != wanted[stored_name(spec, EMBEDDING)]:
            raise _untied(spec, found[name])
    return stored


def _with_base(spec: ModelSpec, found: dict[str, Entry]) -> dict[str, Entry]:
    """`found` under the names that a model with a head has, where it was saved without one."""
    base = spec.weights.base
    if not base or any(name.startswith(base) for name in found):
        return found
    head = stored_name(spec, HEAD)
    return {name if name == head else base + name: entry for name, entry in found.items()}


def _stored(folder: str | Path, spec: ModelSpec, param: Param, found: Mapping[str, Entry]) -> Stored:
    """Where `param` is in `found`; experts there are several tensors, or one as transformers 5 can store them, too."""
    kept = parts(spec, param, stacked=True)
    if kept[0].name not in found:
        kept = parts(spec, param)
    for part in kept:
        if part.name not in found:
            hint = _missing_hint(spec, part.name, found)
            raise ModelError(f"{folder}: {part.name!r} is missing from the weights; {hint}")
        entry = found[part.name]
        if entry.shape != part.shape:
            raise ModelError(
                f"{folder}: {part.name!r} is {entry.shape} in {entry.file.name}, {part.shape} in the "
                f"model of config.json; the two files belong to different models"
            )
        if entry.dtype != found[kept[0].name].dtype:
            raise ModelError(
                f"{folder}: {part.name!r} is {entry.dtype}, {kept[0].name!r} {found[kept[0].name].dtype}; "
                f"parts of one tensor must have one dtype"
            )
    return Stored(param.shape, found[kept[0].name].dtype, tuple((part, found[part.name]) for part in kept))


def _missing_hint(spec: ModelSpec, name: str, found: Mapping[str, Entry]) -> str:
    if name == stored_name(spec, HEAD):
        return "a model whose head is its embedding has tie_word_embeddings: true"
    bare = name.removeprefix("model.")
    return (
        f"it has {bare!r}: save the causal language model, not its base" if bare in found else "fetch the model again"
    )
