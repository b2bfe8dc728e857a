"""Passthrough tensors: kumi neither computes nor trains them, and copies them byte for byte, whatever their dtype.

Examples are a vision tower and multi-token-prediction layers. `kumi.spec.weight_rules.Weights.passthrough` lists the
prefixes of their names.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from kumi.convert.files.byte_runs import BUFFER_BYTES, RunSequence, Target, plain_run
from kumi.convert.files.safetensors_read import Span, read_header, spans_in_folder
from kumi.convert.files.stored_tensor import BLOCK_BYTES, read_bytes
from kumi.errors import ModelError
from kumi.files.output import copy_into
from kumi.files.untrusted import inside
from kumi.spec.model import ModelSpec

# The file of a kumi checkpoint that has the passthrough tensors.
FILE = "carried.safetensors"
# Preprocessing of images and other inputs, copied with the tokenizer.
PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")


def passthrough_tensors(folder: str | Path, spec: ModelSpec) -> dict[str, Span]:
    """Return the passthrough tensors of a model of `spec` in the Hugging Face folder `folder`, by name."""
    return {name: span for name, span in spans_in_folder(Path(folder)).items() if is_passthrough(spec, name)}


def is_passthrough(spec: ModelSpec, name: str) -> bool:
    """True if `name` is a passthrough tensor of `spec`."""
    return bool(spec.weights.passthrough) and name.startswith(spec.weights.passthrough)


def passthrough_of_checkpoint(folder: Path, spec: ModelSpec, source: str | None) -> dict[str, Span]:
    """Return the passthrough tensors of the checkpoint `folder`: from its own file, or from `source`.

    `source` is the Hugging Face folder that training began from; raise ModelError if it is not a folder any more.
    """
    if (folder / FILE).exists():
        return read_header(inside(folder, FILE))
    if source is None or not spec.weights.passthrough:
        return {}
    if not Path(source).is_dir():
        names = ", ".join(f"{prefix}*" for prefix in spec.weights.passthrough)
        raise ModelError(
            f"{folder}: the tensors {names}, which kumi copies unchanged, are in {source}, which is not a "
            f"folder any more; restore it"
        )
    return passthrough_tensors(source, spec)


def copy_processor(source: Path, folder: Path) -> None:
    """Copy the image-processor files of `source` to `folder` unchanged."""
    for name in PROCESSOR_FILES:
        if (source / name).exists():
            copy_into(folder, source, name)


def split_by_size(spans: Mapping[str, Span], limit: int) -> list[dict[str, Span]]:
    """Split `spans` into groups of at most `limit` bytes; a larger tensor gets a group of its own."""
    groups: list[dict[str, Span]] = []
    size = 0
    for name, span in spans.items():
        if not groups or size + span.nbytes > limit:
            groups.append({})
            size = 0
        groups[-1][name] = span
        size += span.nbytes
    return groups


def write_spans(path: Path, spans: Mapping[str, Span]) -> None:
    """Write a safetensors file at `path` with copies of `spans`."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, span in spans.items():
        entries[name] = {"dtype": span.dtype, "shape": list(span.shape), "data_offsets": [offset, offset + span.nbytes]}
        offset += span.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    # Padding keeps the data aligned for readers that map the file into memory.
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        target, buffer = Target(file.fileno(), 0), memoryview(bytearray(BUFFER_BYTES))
        target.write(memoryview(len(text).to_bytes(8, "little") + text))
        for span in spans.values():
            RunSequence([plain_run(span.file, span.offset, span.nbytes)]).copy(0, span.nbytes, target, buffer)


def check_passthrough(written: Mapping[str, Span], spans: Mapping[str, Span], folder: Path) -> None:
    """Raise ModelError, naming the tensor, unless `written` (in `folder`) equals `spans` byte for byte."""
    if written.keys() != spans.keys():
        name = min(written.keys() ^ spans.keys())
        raise ModelError(
            f"{folder}: the passthrough tensor {name!r} is in only one of source and target; convert again"
        )
    for name, span in spans.items():
        copy = written[name]
        same = (copy.dtype, copy.shape) == (span.dtype, span.shape)
        if not same or any(a != b for a, b in zip(_blocks(copy), _blocks(span), strict=True)):
            raise ModelError(f"{folder}: {name!r} differs from {span.file}; the disk may be failing")


def _blocks(span: Span) -> Iterator[bytearray]:
    """Yield the bytes of a tensor in blocks of `BLOCK_BYTES`."""
    for first in range(0, span.nbytes, BLOCK_BYTES):
        block = bytearray(min(BLOCK_BYTES, span.nbytes - first))
        read_bytes(span.file, memoryview(block), span.offset + first)
        yield block
