"""Read untrusted pickles: only the callables listed here are ever called, everything else is refused by name.

Megatron-Core's checkpoints have three kinds: `.metadata` (PyTorch's distributed checkpoint), the non-tensor state
(`common.pt`, or an entry of the checkpoint), and the head of every stored tensor.
"""

from __future__ import annotations

import argparse
import collections
import io
import os
import pickle
import types
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint import filesystem, metadata

from kumi.errors import RefusedError
from kumi.files.untrusted import inside, open_stream

# Upper bound on the bytes of a pickle; a megabyte of metadata describes some ten thousand chunks of tensors.
_MAX_PICKLE_BYTES = 2**31


# Exceptions that a damaged pickle or archive may cause.
_DAMAGED = (
    pickle.UnpicklingError,
    zipfile.BadZipFile,
    EOFError,
    ArithmeticError,
    AttributeError,
    ImportError,
    LookupError,
    MemoryError,
    NotImplementedError,
    OSError,
    RecursionError,
    TypeError,
    ValueError,
)


class Unread:
    """Stands for an object of a class that is not loaded; it accepts any arguments and state, and stores nothing."""

    def __init__(self, *_: object, **__: object) -> None:
        """Ignore all arguments."""

    def __setstate__(self, state: object) -> None:
        """Ignore the state."""


@dataclass(frozen=True)
class Storage:
    """The data of a tensor: dtype, name of their record in the archive, and number of elements."""

    dtype: torch.dtype
    record: str
    count: int


@dataclass(frozen=True)
class Head:
    """A tensor without its data: storage, offset in elements, shape and strides in elements."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


def _head(storage: Storage, offset: int, shape: tuple[int, ...], stride: tuple[int, ...], *_: object) -> Head:
    return Head(storage, offset, tuple(shape), tuple(stride))


def _decode_bytes(text: str, encoding: str) -> bytes:
    """Decode bytes as Python 2 pickles store them: as latin1 text."""
    if encoding != "latin1":
        raise ValueError(f"bytes are encoded as {encoding!r:.20}")
    return text.encode("latin1")


def _path(*parts: str) -> str:
    return str(PurePosixPath(*parts))


def _layout(*_: object) -> torch.layout:
    return torch.strided


_DTYPES = {
    name: getattr(torch, name)
    for name in (
        "float64",
        "float32",
        "float16",
        "bfloat16",
        "float8_e4m3fn",
        "float8_e5m2",
        "int64",
        "int32",
        "int16",
        "int8",
        "uint8",
        "bool",
    )
}
# torch's names of storage classes, and the dtypes that they stand for.
_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}

# Names that any pickle may ask for, and what they stand for here.
_PLAIN: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("argparse", "Namespace"): argparse.Namespace,
    ("types", "SimpleNamespace"): types.SimpleNamespace,
    ("_io", "BytesIO"): io.BytesIO,
    # Under both names of the module: torch.save writes Python 2's names.
    **{
        (module, kind.__name__): kind
        for module in ("builtins", "__builtin__")
        for kind in (set, frozenset, slice, complex, bytearray)
    },
    ("_codecs", "encode"): _decode_bytes,
    ("torch", "Size"): torch.Size,
    ("torch", "device"): Unread,
    ("torch.serialization", "_get_layout"): _layout,
    ("pathlib", "PosixPath"): _path,
    ("pathlib", "Path"): _path,
    ("pathlib._local", "PosixPath"): _path,
    ("torch._utils", "_rebuild_tensor_v2"): _head,
    ("torch._utils", "_rebuild_parameter"): lambda head, *_: head,
    **{("torch", name): dtype for name, dtype in _DTYPES.items()},
    **{("torch", name): dtype for name, dtype in _STORAGES.items()},
}
# Further names that `.metadata` may ask for.
_METADATA: dict[tuple[str, str], Any] = {
    **{
        (metadata.__name__, name): getattr(metadata, name)
        for name in (
            "Metadata",
            "TensorStorageMetadata",
            "TensorProperties",
            "ChunkStorageMetadata",
            "BytesStorageMetadata",
            "MetadataIndex",
            "StorageMeta",
            "_MEM_FORMAT_ENCODING",
        )
    },
    # A subclass in megatron-core up to 0.15; its additions are not needed here.
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata"): metadata.Metadata,
    (filesystem.__name__, "_StorageInfo"): filesystem._StorageInfo,
    # Megatron-Core also stores its save plan, which is not needed here.
    **{
        ("torch.distributed.checkpoint.planner", name): Unread
        for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData")
    },
}
# Packages whose objects describe a run's configuration; they become `Unread`, and nothing is imported.
_UNREAD_PACKAGES = ("megatron.", "transformer_engine.", "nemo.", "signal.", "enum.", "numpy.", "datetime.")


class _Restricted(pickle.Unpickler):
    """An unpickler that resolves `allowed` names only."""

    def __init__(self, file: Any, name: str, allowed: Mapping[tuple[str, str], Any]) -> None:
        super().__init__(file)
        self._name, self._allowed = name, allowed

    def find_class(self, module: str, name: str) -> Any:
        """Return the allowed replacement of `module`.`name`; raise RefusedError for anything not listed."""
        replacement = self._allowed.get((module, name))
        if replacement is not None:
            return replacement
        if f"{module}.".startswith(_UNREAD_PACKAGES) and "." not in name:
            return Unread
        raise RefusedError(
            f"{self._name}: its pickle asks for {module}.{name}, which no Megatron checkpoint needs and which "
            f"could run commands; do not trust this file"
        )

    def persistent_load(self, pid: Any) -> Storage:
        """Return the storage that a tensor's head refers to."""
        # torch.save writes ("storage", type, name of the record, device, number of elements).
        if not (isinstance(pid, tuple) and len(pid) == 5 and isinstance(pid[2], str)):
            raise RefusedError(
                f"{self._name}: a tensor's storage has the invalid description {pid!r:.80}; save the checkpoint again"
            )
        dtype = torch.uint8 if pid[1] is None else pid[1]
        if not (isinstance(dtype, torch.dtype) and type(pid[4]) is int and pid[4] >= 0):
            raise RefusedError(
                f"{self._name}: a tensor's storage has the invalid description {pid!r:.80}; save the checkpoint again"
            )
        return Storage(dtype, pid[2], pid[4])


def _load(file: BinaryIO, name: str, allowed: Mapping[tuple[str, str], Any]) -> Any:
    """Return the object pickled in `file`; raise RefusedError, with `name`, for anything not `allowed`."""
    return _call_guarded(lambda: _Restricted(file, name, allowed).load(), name)


def load_metadata(path: Path) -> metadata.Metadata:
    """Return the metadata of a distributed checkpoint; raise RefusedError unless the file holds just that."""
    with _call_guarded(lambda: open_stream(inside(path.parent, path.name, RefusedError)), str(path)) as file:
        size = os.fstat(file.fileno()).st_size
        if size > _MAX_PICKLE_BYTES:
            raise RefusedError(
                f"{path}: has {size} bytes, and metadata have at most {_MAX_PICKLE_BYTES}; copy the checkpoint again"
            )
        content = _load(file, str(path), _PLAIN | _METADATA)
    if not isinstance(content, metadata.Metadata):
        raise RefusedError(
            f"{path}: holds a {type(content).__name__}, not a checkpoint's metadata; copy the checkpoint again"
        )
    return content


@dataclass(frozen=True)
class Archive:
    """A file that torch.save wrote: its object, with heads for tensors, and offset and length of each record."""

    content: Any
    records: Mapping[str, tuple[int, int]]

    def find(self, record: str) -> tuple[int, int] | None:
        """Return the file offset and length of the data record `record`; None if there is none."""
        return self.records.get(f"data/{record}")


def load_archive(file: BinaryIO, name: str) -> Archive:
    """Return the archive in a seekable `file`; tensor data are not read."""
    archive: Archive = _call_guarded(lambda: _archive(file, name), name)
    return archive


def _archive(file: BinaryIO, name: str) -> Archive:
    """Return the archive in `file`. Raise RefusedError unless its records are uncompressed and have one data.pkl."""
    with zipfile.ZipFile(file) as archive:
        records = {}
        for entry in archive.infolist():
            inner = entry.filename.partition("/")[2]
            if entry.compress_type != zipfile.ZIP_STORED:
                raise RefusedError(
                    f"{name}: {entry.filename!r} is compressed, which torch.save never does; save the checkpoint again"
                )
            if inner in records:
                raise RefusedError(f"{name}: {entry.filename!r} occurs twice; copy the checkpoint again")
            records[inner] = (_data_start(file, entry), entry.file_size)
        if "data.pkl" not in records:
            raise RefusedError(f"{name}: has no data.pkl, so torch.save did not write it; copy the checkpoint again")
        start, length = records["data.pkl"]
        if length > _MAX_PICKLE_BYTES:
            raise RefusedError(
                f"{name}: its data.pkl claims {length} bytes, more than {_MAX_PICKLE_BYTES}; copy the checkpoint again"
            )
        file.seek(start)
        content = _load(io.BytesIO(file.read(length)), name, _PLAIN)
    return Archive(content, records)


def _data_start(file: BinaryIO, entry: zipfile.ZipInfo) -> int:
    """Return the file offset of an entry's data, after its local header with file name and extra field."""
    file.seek(entry.header_offset)
    header = file.read(30)
    if len(header) < 30 or header[:4] != b"PK\x03\x04":
        raise zipfile.BadZipFile(f"no entry begins at {entry.header_offset}")
    return entry.header_offset + 30 + int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")


def _call_guarded(do: Callable[[], Any], name: str) -> Any:
    """Return `do()`; turn any error that a damaged file causes into RefusedError."""
    try:
        return do()
    except RefusedError:
        raise
    except _DAMAGED as error:
        raise RefusedError(f"{name}: cannot be read ({type(error).__name__}: {error!s:.120}); copy it again") from None
