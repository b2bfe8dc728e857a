"""Open untrusted safetensors files: every header is checked before its data are used.

The format is an 8-byte little-endian header length, a JSON header (name -> dtype, shape, offsets), and the raw data. A
header is accepted only if its tensors fill the data without gaps and overlaps, each with the size that its shape and
dtype imply.
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

# Bits per element, by the format's names of dtypes.
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
# Sizes, offsets and numbers of elements must be below this, so that no header makes arithmetic overflow.
_MAX_SIZE = 2**60


@dataclass(frozen=True)
class Span:
    """A tensor in a file: the format's name of its dtype, its shape, and its bytes' offset and count."""

    file: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def read_header(file: Path) -> dict[str, Span]:
    """Return the tensors of a safetensors file by name, in the order of their bytes; only the header is read.

    Raise ModelError for a damaged file or an inconsistent header.
    """
    try:
        handle = open_regular(file)
    except OSError as error:
        raise _unreadable(file, error.strerror or str(error)) from None
    try:
        size = os.fstat(handle).st_size
        length = int.from_bytes(os.pread(handle, 8, 0), "little")
        if size < 10 or length > size - 8:
            raise _unreadable(file, f"the header length is {length} bytes, but the file has {size}")
        if length > BOUNDS.size:
            raise _unreadable(file, f"its header has {length} bytes, and at most {BOUNDS.size} are allowed")
        header = _parse_header(file, _pread(handle, length, 8))
    finally:
        os.close(handle)
    spans = [_span(file, name, entry, 8 + length) for name, entry in header.items() if name != "__metadata__"]
    return _in_order(file, spans, 8 + length, size)


def spans_in_folder(folder: Path) -> dict[str, Span]:
    """Return every tensor of the safetensors file or files in `folder`, by name.

    Raise ModelError where index and files disagree: the index names a file that is missing or outside of the folder, or
    a tensor that is in another file or none; or a file has a tensor that the index does not name.
    """
    index, single = (folder / name for name in (INDEX, SINGLE))
    if not index.exists():
        if not single.exists():
            raise _no_weights(folder)
        return read_header(inside(folder, SINGLE))
    if single.exists():
        raise ModelError(f"{folder}: holds both {SINGLE} and {INDEX}, and only one can be in use; remove the other")
    weight_map = _weight_map(folder)
    names = sorted(set(weight_map.values()))
    files = {name: inside(folder, name) for name in names}
    missing = [name for name in names if not files[name].exists()]
    if missing:
        raise ModelError(f"{folder}: {', '.join(missing)}, named by {INDEX}, is missing; fetch the model again")
    result: dict[str, Span] = {}
    for name in names:
        spans = read_header(files[name])
        _check_against_index(folder, name, spans, weight_map)
        result |= spans
    for tensor, name in weight_map.items():
        if tensor not in result:
            raise ModelError(f"{folder}: {tensor!r} is not in {name}, although {INDEX} says so; fetch the model again")
    return result


def _check_against_index(folder: Path, name: str, spans: Mapping[str, Span], weight_map: Mapping[str, str]) -> None:
    """Raise ModelError unless the index assigns all tensors of the file `name` to it."""
    for tensor in spans:
        if tensor not in weight_map:
            raise ModelError(f"{folder}: {name} holds {tensor!r}, which {INDEX} does not name; fetch the model again")
        if weight_map[tensor] != name:
            raise ModelError(
                f"{folder}: {tensor!r} is in {name}, but {INDEX} says {weight_map[tensor]}; fetch the model again"
            )


def _weight_map(folder: Path) -> dict[str, str]:
    """Return the file of every tensor from the index; raise ModelError if it is malformed."""
    index = folder / INDEX
    weight_map = read_object(folder, INDEX, bounds=BOUNDS).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index}: weight_map is empty or not an object; fetch the file again")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or not name.endswith(".safetensors"):
            raise ModelError(
                f"{index}: {brief(tensor)} is in {brief(name)}, which is not a safetensors file; fetch the file again"
            )
    return weight_map


def _no_weights(folder: Path) -> ModelError:
    """Return the error for a folder without safetensors files."""
    if any(folder.glob("pytorch_model*.bin")):
        return ModelError(
            f"{folder}: the weights are pickled (.bin), and kumi opens no pickles; convert them with transformers: "
            f"AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new)"
        )
    return ModelError(f"{folder}: has neither {SINGLE} nor {INDEX}; name a model folder, which has one of them")


def _parse_header(file: Path, raw: bytes) -> dict[str, Any]:
    """Parse the JSON of a header; raise ModelError unless it is an object with valid __metadata__."""
    try:
        header = strict_json(raw)
    except ValueError as error:
        raise _unreadable(file, f"invalid JSON header: {error}") from None
    if not isinstance(header, dict):
        raise _unreadable(file, "its header is not a JSON object")
    metadata = header.get("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _unreadable(file, "its __metadata__ is not an object of strings")
    return header


def _span(file: Path, name: str, entry: Any, data: int) -> Span:
    """Check the `entry` of a header and return its tensor; data_offsets count from the byte `data` of the file."""
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise _unreadable(file, f"{name!r} must have exactly the keys dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise _unreadable(file, f"{name!r} has the unknown dtype {brief(dtype)}")
    if (
        not _is_size_list(shape)
        or prod(max(1, size) for size in shape) > _MAX_SIZE
        or not _is_size_list(offsets)
        or len(offsets) != 2
    ):
        raise _unreadable(file, f"{name!r} has the invalid shape {brief(shape)} or data_offsets {brief(offsets)}")
    bits = prod(shape) * BITS[dtype]
    if bits % 8 or offsets[1] - offsets[0] != bits // 8:
        raise _unreadable(
            file, f"{name!r} {dtype} {tuple(shape)} takes {bits / 8:.0f} bytes, but its data_offsets are {offsets}"
        )
    return Span(file, name, dtype, tuple(shape), data + offsets[0], bits // 8)


def _is_size_list(value: Any) -> bool:
    """True if `value` is a list of non-negative integers below `_MAX_SIZE`."""
    return isinstance(value, list) and all(type(size) is int and 0 <= size < _MAX_SIZE for size in value)


def _in_order(file: Path, spans: list[Span], data: int, size: int) -> dict[str, Span]:
    """Return `spans` by name; raise ModelError unless they fill the file from the byte `data` to its end."""
    spans.sort(key=lambda span: (span.offset, span.nbytes))
    end = data
    for span in spans:
        if span.offset != end:
            problem = "overlaps the tensor before it" if span.offset < end else "leaves a gap before it"
            raise _unreadable(file, f"{span.name!r} {problem}")
        end += span.nbytes
    if end != size:
        raise _unreadable(file, f"its tensors end at byte {end}, but the file has {size}")
    return {span.name: span for span in spans}


def _unreadable(file: Path, problem: str) -> ModelError:
    """Return the error for a damaged or malformed file."""
    return ModelError(f"{file}: not a readable safetensors file ({problem}); fetch the file again")


def _pread(handle: int, count: int, offset: int) -> bytes:
    """Read `count` bytes from `offset` on, fewer at the end of the file."""
    parts = []
    while count and (part := os.pread(handle, count, offset)):
        parts.append(part)
        count, offset = count - len(part), offset + len(part)
    return b"".join(parts)
