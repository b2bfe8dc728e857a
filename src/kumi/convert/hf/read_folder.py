"""Read Hugging Face model folders strictly: where each native tensor is stored.

A native tensor has kumi's name and shape. It may be stored as several tensors of files, or as a part of one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from kumi.convert.files.byte_runs import Run, plain_run
from kumi.convert.files.safetensors_read import spans_in_folder
from kumi.convert.files.slices import Dims, flat_index, is_contiguous, overlap, rows_are_close
from kumi.convert.files.stored_tensor import BLOCK_BYTES, Entry, entry_of, read_part, run_of
from kumi.convert.files.stream import Reader, Runs
from kumi.convert.hf.passthrough import is_passthrough
from kumi.errors import ModelError
from kumi.spec import families
from kumi.spec.families import read_config
from kumi.spec.families._shared import quantization
from kumi.spec.ledger import EMBEDDING, HEADS
from kumi.spec.ledger import tensors as tensors_of
from kumi.spec.model import ModelSpec
from kumi.spec.op import Param
from kumi.spec.precision import ITEMSIZE
from kumi.spec.weights import Part, stored_name, stored_parts

if TYPE_CHECKING:  # bytes are copied without torch, which takes seconds to import
    from torch import Tensor


@dataclass(frozen=True)
class StoredParam:
    """A native tensor: shape, dtype, and the parts of file tensors that it is read from."""

    shape: tuple[int, ...]
    dtype: str
    parts: tuple[tuple[Part, Entry], ...]


def file_entries(folder: str | Path, spec: ModelSpec | None = None) -> dict[str, Entry]:
    """Return every tensor of the safetensors files in `folder`, by name; only headers are read.

    Quantized tensors appear dequantized. With `spec`, its passthrough tensors are left out.
    """
    folder = Path(folder)
    spans = spans_in_folder(folder)
    selected = {name: span for name, span in spans.items() if spec is None or not is_passthrough(spec, name)}
    method = quantization.quantization_config(read_config(folder)) if (folder / "config.json").exists() else None
    if method is None:
        return {name: entry_of(span) for name, span in selected.items()}
    from kumi.convert.hf import dequantize

    return dequantize.dequantized_entries(folder, selected, method)


def read(stored: StoredParam, start: Dims | None = None, shape: Dims | None = None) -> Tensor:
    """Return `stored`, or its slice that begins at `start` with the shape `shape`. Only its bytes are read."""
    import torch

    out = torch.empty(stored.shape if shape is None else shape, dtype=getattr(torch, stored.dtype))
    read_into(stored, (0,) * len(stored.shape) if start is None else start, out)
    return out


def read_into(stored: StoredParam, start: Dims, out: Tensor) -> None:
    """Fill `out` (of the stored dtype, any strides) with the slice of `stored` that begins at `start`."""
    for part, entry in stored.parts:
        common = overlap(part.start, part.extent, start, tuple(out.shape))
        if common:
            first, shape = common
            inside = tuple(slice(a - b, a - b + n) for a, b, n in zip(first, start, shape))
            read_part(entry, part, tuple(a - b for a, b in zip(first, part.start)), out[inside])


def block_end(stored: StoredParam, row: int) -> int:
    """Return the row before which a block of rows that begins at `row` should end.

    The rows of a block are close together in the file, so no byte is read twice; where rows are scattered, a block is
    the entire tensor.
    """
    rows = stored.shape[0] if stored.shape else 1
    if not all(rows_are_close(part) for part, _ in stored.parts):
        return rows
    row_bytes = max(1, prod(stored.shape[1:])) * ITEMSIZE[stored.dtype]
    return min(rows, row + max(1, BLOCK_BYTES // row_bytes))


def runs(stored: StoredParam) -> Runs | None:
    """Return a function that lists the byte ranges of `stored` in element order.

    None if the files have the elements of `stored` quantized or in another order.
    """
    result: list[Run] = []
    end = 0
    for part, entry in sorted(stored.parts, key=lambda item: flat_index(stored.shape, item[0].start)):
        run = run_of(entry, part)
        if run is None or not is_contiguous(stored.shape, part.extent) or flat_index(stored.shape, part.start) != end:
            return None
        result.append(run)
        end += prod(part.extent)
    return result.copy if end == prod(stored.shape) else None


def folder_reader(stored: Mapping[str, StoredParam]) -> Reader:
    """Return a reader of a model's native tensors."""
    files = {part.name: entry for tensor in stored.values() for part, entry in tensor.parts}

    def file_run(name: str, shape: Dims, dtype: str) -> Run | None:
        entry = files.get(name)
        if entry is None or entry.decode is not None or (entry.shape, entry.dtype) != (shape, dtype):
            return None
        return plain_run(entry.file, entry.offset, prod(shape) * ITEMSIZE[dtype])

    return Reader(
        {name: tensor.dtype for name, tensor in stored.items()},
        lambda name, start, out: read_into(stored[name], start, out),
        lambda name, row: block_end(stored[name], row),
        lambda name: runs(stored[name]),
        file_run,
    )


def locate_params(folder: str | Path, spec: ModelSpec) -> dict[str, StoredParam]:
    """Return where every tensor of `spec` is stored; raise ModelError unless `folder` holds exactly these tensors.

    Also allowed in the folder: rotary tables that old versions of transformers saved, a copy of the tied embedding (its
    values are compared), and passthrough tensors.
    """
    stored, head = locate_params_by_headers(folder, spec), file_entries(folder, spec).get(_head_name(spec))
    if spec.tie_word_embeddings and head is not None:
        copy = StoredParam(head.shape, head.dtype, ((_entire(head), head),))
        if copy.dtype != stored[EMBEDDING].dtype or not _equal(copy, stored[EMBEDDING]):
            raise _untied_error(spec, head)
    return stored


def _head_name(spec: ModelSpec) -> str:
    """Return the name of the head in files."""
    return stored_name(spec, HEADS[spec.head])


def spec_of_folder(folder: str | Path, spec: ModelSpec) -> ModelSpec:
    """Return the model whose tensors `folder` has: `spec`, or the language model that a reward model begins from.

    The head of that language model is tied in the result if `folder` has no tensor of it.
    """
    config = Path(folder) / "config.json"
    if spec.head == "lm" or (config.exists() and families.from_hf(read_config(folder)).head == "score"):
        return spec
    entries, language_model = file_entries(folder, spec), replace(spec, head="lm")
    return replace(language_model, tie_word_embeddings=_head_name(language_model) not in entries)


def _entire(entry: Entry) -> Part:
    """Return the part that is the entire file tensor `entry`."""
    zeros = (0,) * len(entry.shape)
    return Part(entry.name, entry.shape, zeros, entry.shape, entry.shape, zeros, entry.shape, (*range(len(zeros)),))


def _equal(a: StoredParam, b: StoredParam) -> bool:
    """True if two tensors of one shape and dtype have equal values, compared a few rows at a time."""
    row, rest = 0, (0,) * (len(a.shape) - 1)
    while row < a.shape[0]:
        end = block_end(a, row)
        shape = (end - row, *a.shape[1:])
        if not read(a, (row, *rest), shape).equal(read(b, (row, *rest), shape)):
            return False
        row = end
    return True


def _untied_error(spec: ModelSpec, head: Entry) -> ModelError:
    """Return the error for a head that differs from the embedding although config.json ties them."""
    return ModelError(
        f"{head.file}: {head.name!r} differs from {stored_name(spec, EMBEDDING)!r}, but config.json ties "
        f"them; set tie_word_embeddings to false in config.json"
    )


def locate_params_by_headers(folder: str | Path, spec: ModelSpec) -> dict[str, StoredParam]:
    """Return where every tensor of `spec` is stored, from the headers alone.

    Raise ModelError unless names and shapes in `folder` are those of `spec`, and each native tensor has one dtype.
    """
    by_name = _with_base(spec, file_entries(folder, spec))
    stored = {param.name: _locate_param(folder, spec, param, by_name) for param in tensors_of(spec)}
    expected = {part.name: part.shape for tensor in stored.values() for part, _ in tensor.parts}
    for name in by_name.keys() - expected.keys():
        if name.endswith(spec.weights.ignored):
            continue
        if name != _head_name(spec) or not spec.tie_word_embeddings:
            raise ModelError(
                f"{by_name[name].file}: {name!r} {by_name[name].shape} is not a tensor of the {spec.family} "
                f"model of this config.json, and kumi would drop it; fetch the config.json of this model"
            )
        if by_name[name].shape != expected[stored_name(spec, EMBEDDING)]:
            raise _untied_error(spec, by_name[name])
    return stored


def _with_base(spec: ModelSpec, by_name: dict[str, Entry]) -> dict[str, Entry]:
    """Return `by_name`, with the base model's prefix added to names where the model was saved without its head."""
    base = spec.weights.base
    if not base or any(name.startswith(base) for name in by_name):
        return by_name
    head = _head_name(spec)
    return {name if name == head else base + name: entry for name, entry in by_name.items()}


def _locate_param(folder: str | Path, spec: ModelSpec, param: Param, by_name: Mapping[str, Entry]) -> StoredParam:
    """Return where `param` is stored; `by_name` has the tensors of `folder`.

    Experts are one stacked tensor (transformers 5) or several. Raise ModelError for a missing part, or parts whose
    shapes or dtypes do not fit.
    """
    param_parts = stored_parts(spec, param, stacked=True)
    if param_parts[0].name not in by_name:
        param_parts = stored_parts(spec, param)
    for part in param_parts:
        if part.name not in by_name:
            hint = _missing_hint(spec, part.name, by_name)
            raise ModelError(f"{folder}: {part.name!r} is missing from the weights; {hint}")
        entry = by_name[part.name]
        if entry.shape != part.shape:
            raise ModelError(
                f"{folder}: {part.name!r} is {entry.shape} in {entry.file.name}, but {part.shape} in the "
                f"model of config.json; the two files belong to different models"
            )
        if entry.dtype != by_name[param_parts[0].name].dtype:
            raise ModelError(
                f"{folder}: {part.name!r} is {entry.dtype}, but {param_parts[0].name!r} is "
                f"{by_name[param_parts[0].name].dtype}, and both are parts of one tensor; save them in one dtype"
            )
    return StoredParam(
        param.shape, by_name[param_parts[0].name].dtype, tuple((part, by_name[part.name]) for part in param_parts)
    )


def _missing_hint(spec: ModelSpec, name: str, by_name: Mapping[str, Entry]) -> str:
    """Return the likely reason or remedy for the missing tensor `name`."""
    if name == HEADS["score"]:
        return "config.json describes a reward model: fetch its weights again, or name the language model"
    if name == _head_name(spec):
        return "if the head is the embedding, set tie_word_embeddings to true in config.json"
    bare = name.removeprefix("model.")
    return (
        f"the folder has {bare!r} instead: save the causal language model, not its base model"
        if bare in by_name
        else "fetch the model again"
    )
