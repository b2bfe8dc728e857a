"""Hugging Face model folders: reading them strictly, and the one place to write them from."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kumi.convert.card import model_card
from kumi.convert.hf_write import write
from kumi.errors import ModelError
from kumi.spec.ledger import EMBEDDING, HEAD
from kumi.spec.ledger import tensors as tensors_of
from kumi.spec.model import ModelSpec
from kumi.spec.op import Param
from kumi.spec.weights import Part, parts, stored_name

__all__ = ["Entry", "Stored", "check", "entries", "model_card", "read", "read_tensors", "write"]

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"

# safetensors' names of the dtypes that weights may have, and torch's.
DTYPES = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}


@dataclass(frozen=True)
class Entry:
    """A stored tensor: its file, shape and dtype (torch's name). Its data are read when asked for."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Stored:
    """A tensor of a model: its shape and dtype, and the parts of it that files hold."""

    shape: tuple[int, ...]
    dtype: str
    parts: tuple[tuple[Part, Entry], ...]


def entries(folder: str | Path) -> dict[str, Entry]:
    """Every tensor of the safetensors file or files in `folder`, by name; nothing but headers is read."""
    found: dict[str, Entry] = {}
    for file in _files(Path(folder)):
        with _opened(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118 (it is no mapping)
                part = tensors.get_slice(name)
                dtype = DTYPES.get(part.get_dtype())
                if dtype is None:
                    raise ModelError(f"{file}: {name!r} has dtype {part.get_dtype()}; kumi reads {', '.join(DTYPES)}: "
                                     f"export the model without quantisation")  # fmt: skip
                found[name] = Entry(file, name, tuple(part.get_shape()), dtype)
    return found


def read(stored: Stored, start: tuple[int, ...] | None = None, shape: tuple[int, ...] | None = None) -> Tensor:
    """The tensor `stored`, or its part of `shape` from the indices `start` on; nothing else is read."""
    start = (0,) * len(stored.shape) if start is None else start
    shape = stored.shape if shape is None else shape
    wanted = [(part, entry, found) for part, entry in stored.parts if (found := _overlap(part, start, shape))]
    if len(wanted) == 1:
        with _opened(wanted[0][1].file) as tensors:
            return _read_part(tensors, *wanted[0])
    out = torch.empty(shape, dtype=getattr(torch, stored.dtype))
    for file, same in groupby(wanted, key=lambda found: found[1].file):
        with _opened(file) as tensors:
            for part, entry, found in same:
                place = tuple(slice(a - b, a - b + n) for a, b, n in zip(found.start, start, found.shape))
                out[place] = _read_part(tensors, part, entry, found)
    return out


@dataclass(frozen=True)
class _Overlap:
    """What a part and a wanted rectangle have in common: a rectangle of the whole tensor."""

    start: tuple[int, ...]
    shape: tuple[int, ...]


def _overlap(part: Part, start: tuple[int, ...], shape: tuple[int, ...]) -> _Overlap | None:
    first = tuple(map(max, part.start, start))
    ends = (min(a + n, b + m) for a, n, b, m in zip(part.start, part.extent, start, shape))
    size = tuple(end - a for a, end in zip(first, ends))
    return _Overlap(first, size) if all(n > 0 for n in size) else None


def _read_part(tensors: Any, part: Part, entry: Entry, found: _Overlap) -> Tensor:
    """The elements `found` of `part`, from its open file, in the shape that they have in the whole tensor."""
    if part.is_whole and found.shape == part.extent:
        whole: Tensor = tensors.get_tensor(entry.name)
        return whole.view(part.extent)
    offsets = [a - b for a, b in zip(found.start, part.start)]
    if part.in_order:
        # Dims that only the whole tensor has, of size 1 in the part, come before those of the file.
        first = len(part.extent) - len(part.shape)
        inner = zip(part.at, offsets[first:], found.shape[first:], strict=True)
        piece: Tensor = tensors.get_slice(entry.name)[tuple(slice(a + b, a + b + n) for a, b, n in inner)]
        return piece.view(found.shape)
    seen = tensors.get_tensor(entry.name).view(part.view)[_box(part.at, part.size)]
    taken: Tensor = seen.permute(part.order).reshape(part.extent)[_box(offsets, found.shape)]
    return taken


def _box(start: Sequence[int], shape: Sequence[int]) -> tuple[slice, ...]:
    """The rectangle of `shape` from `start` on, as indices."""
    return tuple(slice(a, a + n) for a, n in zip(start, shape, strict=True))


def read_tensors(folder: str | Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor in the files of `folder`, one at a time, with its name there."""
    for name, entry in entries(folder).items():
        yield name, _read_entry(entry)


def check(folder: str | Path, spec: ModelSpec) -> dict[str, Stored]:
    """Where every tensor of `spec` is stored, once it is sure that `folder` holds exactly these.

    ModelError for a tensor that is missing, unknown or of another shape. Accepted besides: the rotary tables that old
    versions of transformers saved, and a copy of the tied embedding.
    """
    stored, head = check_headers(folder, spec), entries(folder).get(stored_name(spec, HEAD))
    if spec.tie_word_embeddings and head is not None and not _read_entry(head).equal(read(stored[EMBEDDING])):
        raise _untied(spec, head)
    return stored


def _untied(spec: ModelSpec, head: Entry) -> ModelError:
    return ModelError(f"{head.file}: {head.name!r} differs from {stored_name(spec, EMBEDDING)!r}, but config.json ties "
                      f"them; set tie_word_embeddings to false")  # fmt: skip


def _read_entry(entry: Entry) -> Tensor:
    with _opened(entry.file) as tensors:
        whole: Tensor = tensors.get_tensor(entry.name)
    return whole


def check_headers(folder: str | Path, spec: ModelSpec) -> dict[str, Stored]:
    """Where every tensor of `spec` is stored, once it is sure that the names and shapes in `folder` are those of
    `spec`; no tensor is read."""
    found = _with_base(spec, entries(folder))
    stored = {param.name: _stored(folder, spec, param, found) for param in tensors_of(spec)}
    wanted = {part.name: part.shape for one in stored.values() for part, _ in one.parts}
    for name in found.keys() - wanted.keys():
        if name.endswith(spec.weights.ignored):
            continue
        if name != stored_name(spec, HEAD) or not spec.tie_word_embeddings:
            raise ModelError(f"{found[name].file}: {name!r} {found[name].shape} has no place in the {spec.family} "
                             f"model of this config.json; kumi would drop it")  # fmt: skip
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
            raise ModelError(f"{folder}: {part.name!r} is {entry.shape} in {entry.file.name}, {part.shape} in the "
                             f"model of config.json; the two files belong to different models")  # fmt: skip
        if entry.dtype != found[kept[0].name].dtype:
            raise ModelError(f"{folder}: {part.name!r} is {entry.dtype}, {kept[0].name!r} {found[kept[0].name].dtype}; "
                             f"parts of one tensor must have one dtype")  # fmt: skip
    return Stored(param.shape, found[kept[0].name].dtype, tuple((part, found[part.name]) for part in kept))


def _missing_hint(spec: ModelSpec, name: str, found: Mapping[str, Entry]) -> str:
    if name == stored_name(spec, HEAD):
        return "a model whose head is its embedding has tie_word_embeddings: true"
    bare = name.removeprefix("model.")
    return (
        f"it has {bare!r}: save the causal language model, not its base" if bare in found else "fetch the model again"
    )


def _files(folder: Path) -> list[Path]:
    """The weight files of `folder`, named by the index where there is one."""
    index = folder / INDEX
    if index.exists():
        files = sorted({folder / str(file) for file in _weight_map(index).values()})
    elif (folder / SINGLE).exists():
        files = [folder / SINGLE]
    elif any(folder.glob("pytorch_model*.bin")):
        raise ModelError(f"{folder}: the weights are pickled (.bin), which kumi does not open; use transformers: "
                         f"AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new)")  # fmt: skip
    else:
        raise ModelError(f"{folder}: there is neither {SINGLE} nor {INDEX}; a model folder has one of them")
    missing = [file.name for file in files if not file.exists()]
    if missing:
        raise ModelError(f"{folder}: {', '.join(missing)} named by {INDEX} is missing; fetch the model again")
    return files


def _weight_map(index: Path) -> dict[str, Any]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise ModelError(f"{index}: not a weight index ({error!r}); fetch the file again") from None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index}: weight_map is empty or no object; fetch the file again")
    return weight_map


def _opened(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file}: not a readable safetensors file ({error}); fetch the file again") from None
