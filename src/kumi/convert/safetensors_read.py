"""Opening safetensors files that anyone may have made: nothing is believed before it is checked.

The format is an 8-byte little-endian header length, a JSON header (name -> dtype, shape, offsets), and the raw data. A
header is taken only when its tensors lie in the file one after the other, each as long as its shape and dtype say, from
the first byte of the data to the last: no byte is read twice, left out, or looked for beyond the end.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from kumi.errors import ModelError
from kumi.files.untrusted import INDEX as BOUNDS
from kumi.files.untrusted import brief, inside, open_regular, read_object, strict_json

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"

# Bits of an element, by the format's names of dtypes.
BITS = {
    "F64": 64,
    "F32": 32,
    "F16": 16,
    "BF16": 16,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "F4": 4,
    "I64": 64,
    "I32": 32,
    "I16": 16,
    "I8": 8,
    "U64": 64,
    "U32": 32,
    "U16": 16,
    "U8": 8,
    "BOOL": 8,
    "C64": 64,
}
_MAX_SIZE = 2**60


@dataclass(frozen=True)
class Span:
    """A tensor in a file: the format's name of its dtype, its shape, and where its bytes are."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def read_header(file: Path) -> dict[str, Span]:
    """The tensors of a safetensors file, by name, in the order of their bytes; nothing but the header is read.

    ModelError where the file is damaged, or not what it says.
    """
    try:
        handle = open_regular(file)
    except OSError as error:
        raise _unreadable(file, error.strerror or str(error)) from None
    try:
        size = os.fstat(handle).st_size
        length = int.from_bytes(os.pread(handle, 8, 0), "little")
        if size < 10 or length > size - 8:
            raise _unreadable(file, f"its header is said to have {length} bytes, the file has {size}")
        if length > BOUNDS.size:
            raise _unreadable(file, f"a header of {length} bytes, more than the {BOUNDS.size} that the format allows")
        header = _parsed(file, _pread(handle, length, 8))
    finally:
        os.close(handle)
    spans = [_span(file, name, entry, 8 + length) for name, entry in header.items() if name != "__metadata__"]
    return _in_order(file, spans, 8 + length, size)


def tensors_of(folder: Path) -> dict[str, Span]:
    """Every tensor of the safetensors file or files in `folder`, by name, where index and files agree.

    ModelError for an index that names files outside of the folder, files that are missing, and tensors that are in no
    file, in another one than the index says, or that it does not name.
    """
    index, single = (folder / name for name in (INDEX, SINGLE))
    if not index.exists():
        if not single.exists():
            raise _no_weights(folder)
        return read_header(inside(folder, SINGLE))
    if single.exists():
        raise ModelError(f"{folder}: holds both {SINGLE} and {INDEX}, of which one is not in use; remove that one")
    weight_map = _weight_map(folder)
    names = sorted(set(weight_map.values()))
    files = {name: inside(folder, name) for name in names}
    missing = [name for name in names if not files[name].exists()]
    if missing:
        raise ModelError(f"{folder}: {', '.join(missing)} named by {INDEX} is missing; fetch the model again")
    found: dict[str, Span] = {}
    for name in names:
        spans = read_header(files[name])
        _compare(folder, name, spans, weight_map)
        found |= spans
    for tensor, name in weight_map.items():
        if tensor not in found:
            raise ModelError(f"{folder}: {tensor!r} is not in {name}, where {INDEX} says; fetch the model again")
    return found


def _compare(folder: Path, name: str, spans: Mapping[str, Span], weight_map: Mapping[str, str]) -> None:
    for tensor in spans:
        if tensor not in weight_map:
            raise ModelError(f"{folder}: {name} holds {tensor!r}, which {INDEX} does not name; fetch the model again")
        if weight_map[tensor] != name:
            raise ModelError(
                f"{folder}: {tensor!r} is in {name}, and in {weight_map[tensor]} by {INDEX}; fetch the model again"
            )


def _weight_map(folder: Path) -> dict[str, str]:
    index = folder / INDEX
    weight_map = read_object(folder, INDEX, bounds=BOUNDS).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index}: weight_map is empty or no object; fetch the file again")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or not name.endswith(".safetensors"):
            raise ModelError(
                f"{index}: {brief(tensor)} is in {brief(name)}, which is no safetensors file; fetch the file again"
            )
    return weight_map


def _no_weights(folder: Path) -> ModelError:
    if any(folder.glob("pytorch_model*.bin")):
        return ModelError(
            f"{folder}: the weights are pickled (.bin), which kumi does not open; use transformers: "
            f"AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new)"
        )
    return ModelError(f"{folder}: there is neither {SINGLE} nor {INDEX}; a model folder has one of them")


def _parsed(file: Path, raw: bytes) -> dict[str, Any]:
    try:
        header = strict_json(raw)
    except ValueError as error:
        raise _unreadable(file, f"its header is no JSON: {error}") from None
    if not isinstance(header, dict):
        raise _unreadable(file, "its header is no JSON object")
    facts = header.get("__metadata__", {})
    if not isinstance(facts, dict) or not all(isinstance(value, str) for value in facts.values()):
        raise _unreadable(file, "its __metadata__ is no object of texts")
    return header


def _span(file: Path, name: str, entry: Any, data: int) -> Span:
    """The checked `entry` of a header, whose offsets count from the byte `data` on."""
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise _unreadable(file, f"{name!r} does not have a dtype, a shape and data_offsets, and these alone")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise _unreadable(file, f"{name!r} has dtype {brief(dtype)}, which the format does not have")
    if (
        not _sizes(shape)
        or prod(max(1, size) for size in shape) > _MAX_SIZE
        or not _sizes(offsets)
        or len(offsets) != 2
    ):
        raise _unreadable(file, f"{name!r} has the shape {brief(shape)} and the data_offsets {brief(offsets)}")
    bits = prod(shape) * BITS[dtype]
    if bits % 8 or offsets[1] - offsets[0] != bits // 8:
        raise _unreadable(
            file, f"{name!r} {dtype} {tuple(shape)} takes {bits / 8:.0f} bytes, its data_offsets are {offsets}"
        )
    return Span(file, name, dtype, tuple(shape), data + offsets[0], bits // 8)


def _sizes(found: Any) -> bool:
    return isinstance(found, list) and all(type(size) is int and 0 <= size < _MAX_SIZE for size in found)


def _in_order(file: Path, spans: list[Span], data: int, size: int) -> dict[str, Span]:
    """`spans` by name, once they lie one after the other from `data` to the end of the file."""
    spans.sort(key=lambda span: (span.offset, span.nbytes))
    end = data
    for span in spans:
        if span.offset != end:
            what = "overlaps the tensor before it" if span.offset < end else "leaves a gap before it"
            raise _unreadable(file, f"{span.name!r} {what}")
        end += span.nbytes
    if end != size:
        raise _unreadable(file, f"its tensors end at byte {end}, the file has {size}")
    return {span.name: span for span in spans}


def _unreadable(file: Path, what: str) -> ModelError:
    return ModelError(f"{file}: not a readable safetensors file ({what}); fetch the file again")


def _pread(handle: int, count: int, offset: int) -> bytes:
    parts = []
    while count and (part := os.pread(handle, count, offset)):
        parts.append(part)
        count, offset = count - len(part), offset + len(part)
    return b"".join(parts)
