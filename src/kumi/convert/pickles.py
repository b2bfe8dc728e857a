"""Reading pickles that may be hostile: only what is listed here is ever called, everything else is refused by name.

Megatron-Core's checkpoints have three: `.metadata` (PyTorch's distributed checkpointing), the state that is no tensor
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

# The longest pickle that is read: a megabyte of metadata describes some ten thousand pieces of tensors.
LIMIT = 2**31


# What reading a damaged pickle or archive may raise.
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
    """An object of a class that is not loaded: it can be made and filled, and does nothing."""

    def __init__(self, *_: object, **__: object) -> None:
        """Nothing is kept of what it is made from."""

    def __setstate__(self, state: object) -> None:
        """Nothing is kept of its state."""


@dataclass(frozen=True)
class Storage:
    """What a tensor's head says of its data: their record in the archive, dtype and number."""

    dtype: torch.dtype
    record: str
    count: int


@dataclass(frozen=True)
class Head:
    """A stored tensor without its data."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


def _head(storage: Storage, offset: int, shape: tuple[int, ...], stride: tuple[int, ...], *_: object) -> Head:
    return Head(storage, offset, tuple(shape), tuple(stride))


def _bytes(text: str, encoding: str) -> bytes:
    """How such pickles write bytes."""
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

_PLAIN: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("argparse", "Namespace"): argparse.Namespace,
    ("types", "SimpleNamespace"): types.SimpleNamespace,
    ("_io", "BytesIO"): io.BytesIO,
    # Under both names of the module: torch.save writes pickles as Python 2 would read them.
    **{
        (module, kind.__name__): kind
        for module in ("builtins", "__builtin__")
        for kind in (set, frozenset, slice, complex, bytearray)
    },
    ("_codecs", "encode"): _bytes,
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
    # A subclass of it in megatron-core up to 0.15, with nothing that is needed here.
    ("megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata"): metadata.Metadata,
    (filesystem.__name__, "_StorageInfo"): filesystem._StorageInfo,
    # Megatron-Core keeps how it saved beside what it saved.
    **{
        ("torch.distributed.checkpoint.planner", name): Unread
        for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData", "BytesIOWriteData")
    },
}
# Packages whose objects say how a run was started; they are passed over, and nothing of them is loaded.
_PASSED_OVER = ("megatron.", "transformer_engine.", "nemo.", "signal.", "enum.", "numpy.", "datetime.")


class _Restricted(pickle.Unpickler):
    def __init__(self, file: Any, name: str, allowed: Mapping[tuple[str, str], Any]) -> None:
        super().__init__(file)
        self._name, self._allowed = name, allowed

    def find_class(self, module: str, name: str) -> Any:
        """What `module`.`name` stands for here, which is not necessarily what it is."""
        found = self._allowed.get((module, name))
        if found is not None:
            return found
        if f"{module}.".startswith(_PASSED_OVER) and "." not in name:
            return Unread
        raise RefusedError(
            f"{self._name}: its pickle asks for {module}.{name}, which no Megatron checkpoint needs; it "
            f"is not opened, for it may run commands"
        )

    def persistent_load(self, pid: Any) -> Storage:
        """The storage that a tensor's head names."""
        if not (isinstance(pid, tuple) and len(pid) == 5 and isinstance(pid[2], str)):
            raise RefusedError(f"{self._name}: a tensor's storage is described by {pid!r:.80}; save it again")
        dtype = torch.uint8 if pid[1] is None else pid[1]
        if not (isinstance(dtype, torch.dtype) and type(pid[4]) is int and pid[4] >= 0):
            raise RefusedError(f"{self._name}: a tensor's storage is described by {pid!r:.80}; save it again")
        return Storage(dtype, pid[2], pid[4])


def _load(file: BinaryIO, name: str, allowed: Mapping[tuple[str, str], Any]) -> Any:
    """The object pickled in `file`, which errors call `name`; RefusedError where it asks for anything not `allowed`."""
    return _guarded(lambda: _Restricted(file, name, allowed).load(), name)


def load_metadata(path: Path) -> metadata.Metadata:
    """The metadata of a distributed checkpoint."""
    with _guarded(lambda: open_stream(inside(path.parent, path.name, RefusedError)), str(path)) as file:
        size = os.fstat(file.fileno()).st_size
        if size > LIMIT:
            raise RefusedError(
                f"{path}: {size} bytes are more than metadata have ({LIMIT}); the file is something else"
            )
        found = _load(file, str(path), _PLAIN | _METADATA)
    if not isinstance(found, metadata.Metadata):
        raise RefusedError(f"{path}: holds {type(found).__name__}, not the metadata of a checkpoint")
    return found


@dataclass(frozen=True)
class Archive:
    """A file written by torch.save: the object in it, tensors without their data, and where each record begins."""

    content: Any
    records: Mapping[str, tuple[int, int]]

    def find(self, record: str) -> tuple[int, int] | None:
        """First byte in the file and length of the data called `record`."""
        return self.records.get(f"data/{record}")


def load_archive(file: BinaryIO, name: str) -> Archive:
    """The archive in `file`, a seekable one; no tensor's data are read."""
    found: Archive = _guarded(lambda: _archive(file, name), name)
    return found


def _archive(file: BinaryIO, name: str) -> Archive:
    with zipfile.ZipFile(file) as found:
        records = {}
        for entry in found.infolist():
            inner = entry.filename.partition("/")[2]
            if entry.compress_type != zipfile.ZIP_STORED:
                raise RefusedError(f"{name}: {entry.filename!r} is compressed, which torch.save never does")
            if inner in records:
                raise RefusedError(f"{name}: {entry.filename!r} is there twice")
            records[inner] = (_data_start(file, entry), entry.file_size)
        if "data.pkl" not in records:
            raise RefusedError(f"{name}: has no data.pkl; it was not written by torch.save")
        start, length = records["data.pkl"]
        if length > LIMIT:
            raise RefusedError(f"{name}: its data.pkl is said to have {length} bytes; the file is damaged")
        file.seek(start)
        content = _load(io.BytesIO(file.read(length)), name, _PLAIN)
    return Archive(content, records)


def _data_start(file: BinaryIO, entry: zipfile.ZipInfo) -> int:
    """Where the data of `entry` begin: behind a header that has the name and an extra field once more."""
    file.seek(entry.header_offset)
    header = file.read(30)
    if len(header) < 30 or header[:4] != b"PK\x03\x04":
        raise zipfile.BadZipFile(f"no entry begins at {entry.header_offset}")
    return entry.header_offset + 30 + int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")


def _guarded(do: Callable[[], Any], name: str) -> Any:
    """What `do` returns; RefusedError for whatever a damaged file makes of it."""
    try:
        return do()
    except RefusedError:
        raise
    except _DAMAGED as error:
        raise RefusedError(f"{name}: cannot be read ({type(error).__name__}: {error!s:.120}); copy it again") from None
