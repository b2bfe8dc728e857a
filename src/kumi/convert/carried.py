"""Tensors that a model carries along: neither computed nor trained, and written again byte by byte.

A vision tower, or layers that predict tokens further ahead (`kumi.spec.rules.Weights.carried` has the beginnings of
their names). They are bytes here, of whatever dtype.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from kumi.convert.entry import BLOCK_BYTES, read_bytes
from kumi.convert.runs import BUFFER_BYTES, Stored, Target, plain_run
from kumi.convert.safetensors_read import Span, read_header, tensors_of
from kumi.errors import ModelError
from kumi.files.output import copy_into
from kumi.files.untrusted import inside
from kumi.spec.model import ModelSpec

# Where a checkpoint of kumi has them.
FILE = "carried.safetensors"
# Files of a folder that say how images and the like are given to a model.
PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")


def carried(folder: str | Path, spec: ModelSpec) -> dict[str, Span]:
    """Those of the tensors in the Hugging Face folder `folder` that a `spec` carries along."""
    return {name: span for name, span in tensors_of(Path(folder)).items() if is_carried(spec, name)}


def is_carried(spec: ModelSpec, name: str) -> bool:
    """Whether files have, under `name`, what a `spec` carries along."""
    return bool(spec.weights.carried) and name.startswith(spec.weights.carried)


def of_checkpoint(folder: Path, spec: ModelSpec, source: str | None) -> dict[str, Span]:
    """What the checkpoint `folder` carries along: a file of its own, or what it took from the folder `source`."""
    if (folder / FILE).exists():
        return read_header(inside(folder, FILE))
    if source is None or not spec.weights.carried:
        return {}
    if not Path(source).is_dir():
        names = ", ".join(f"{beginning}*" for beginning in spec.weights.carried)
        raise ModelError(
            f"{folder}: the tensors {names} that its model carries along are in {source}, which is no "
            f"folder (any more); put it back"
        )
    return carried(source, spec)


def copy_processor(source: Path, folder: Path) -> None:
    """Copy what `source` says of how images are given to its model, as it is."""
    for name in PROCESSOR_FILES:
        if (source / name).exists():
            copy_into(folder, source, name)


def grouped(spans: Mapping[str, Span], limit: int) -> list[dict[str, Span]]:
    """`spans` in groups of no more than `limit` bytes, where none is larger."""
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
    """Write the safetensors file `path` with copies of `spans`."""
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
            Stored([plain_run(span.file, span.offset, span.nbytes)]).copy(0, span.nbytes, target, buffer)


def check_equal(written: Mapping[str, Span], spans: Mapping[str, Span], folder: Path) -> None:
    """Nothing, when `written` in `folder` are `spans` byte by byte; ModelError naming the first that is not."""
    if written.keys() != spans.keys():
        name = min(written.keys() ^ spans.keys())
        raise ModelError(f"{folder}: {name!r}, which is carried along, is in one of source and target alone")
    for name, span in spans.items():
        found = written[name]
        same = (found.dtype, found.shape) == (span.dtype, span.shape)
        if not same or any(one != other for one, other in zip(_blocks(found), _blocks(span), strict=True)):
            raise ModelError(f"{folder}: {name!r} differs from {span.file}; the disk may be failing")


def _blocks(span: Span) -> Iterator[bytearray]:
    for first in range(0, span.nbytes, BLOCK_BYTES):
        block = bytearray(min(BLOCK_BYTES, span.nbytes - first))
        read_bytes(span.file, memoryview(block), span.offset + first)
        yield block
