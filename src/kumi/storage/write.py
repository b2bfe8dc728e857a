"""Write a checkpoint: one safetensors file per rank, and one index with the position of each piece of each tensor.

Each rank writes its pieces to `shard_00003.safetensors`, in the plain safetensors format, and lists them in
`shard_00003.json`. Rank 0 waits for these lists, checks that the pieces of each tensor tile it, merges the lists into
`index.json`, adds `meta.json`, and renames the folder. All files are synced to disk before the rename, so a kill at any
time leaves either a complete checkpoint or none.

Checksums are CRC-32. Each block of a piece has one; a block is as many full rows as fit in `BLOCK_BYTES`, so a reader
verifies a slice without reading the rest of the shard. The index also has the checksum of each shard's header, and each
JSON file ends with the checksum of its text.
"""

from __future__ import annotations

import json
import math
import os
import time
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from kumi.errors import SaveError
from kumi.files.output import make_folder, open_new, refuse_link
from kumi.files.untrusted import Bounds, read_regular, strict_json
from kumi.storage.folders import sync_folder

if TYPE_CHECKING:  # importing torch takes seconds, and copying bytes does not need it
    import torch

# Version of the checkpoint format, written into each index.
FORMAT = 1
# Most bytes of a block, unless a single row has more.
BLOCK_BYTES = 4 * 2**20
# An index has one checksum per block: 250,000 checksums, 3 MB of JSON, for a terabyte of tensors.
MAX_INDEX_BYTES = 2 * 10**9
# The end of each JSON file, with the checksum of the text before it.
_SEAL = ',\n"crc32": "%08x"}\n'

# torch's name of each dtype -> the safetensors name, and the bytes of an element.
DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "bfloat16": "BF16",
    "float16": "F16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
ITEMSIZE = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}


class Piece(NamedTuple):
    """A rectangle of a global tensor, with its data.

    name, shape: the global tensor.
    start: index of the rectangle's first element.
    data: the elements; its shape is the rectangle's extent.
    """

    name: str
    shape: tuple[int, ...]
    start: tuple[int, ...]
    data: torch.Tensor


def write_pieces(folder: Path | str, rank: int, pieces: Sequence[Piece], *, attempt: str = "") -> None:
    """Write the pieces of `rank` and their index to `folder`, a temporary folder, and sync them to disk.

    `attempt` identifies one launch: the same text on all its ranks, another text in any other launch. A commit ignores
    indexes of other attempts, which a dead launch may have left in the folder. Raise SaveError when a write fails.
    """
    folder = Path(folder)
    pieces = [piece for piece in pieces if piece.data.numel() > 0 or math.prod(piece.shape) == 0]
    for piece in pieces:
        _assert_inside(piece)
    try:
        make_folder(folder)
        shard = folder / f"shard_{rank:05d}.safetensors"
        with open_new(shard, "wb", buffering=0) as file:
            entries, header = _write_shard(file, pieces)
            os.fsync(file.fileno())
        write_index(shard, rank, entries, header, attempt)
    except OSError as error:
        raise SaveError(f"{folder}: rank {rank} cannot write its part of the checkpoint: {error}") from error


def commit(
    temporary: Path | str,
    folder: Path | str,
    meta: Mapping[str, Any],
    *,
    ranks: int,
    attempt: str = "",
    timeout: float = 0.0,
    beside: Collection[str] = (),
) -> Path:
    """Commit the checkpoint: merge the indexes of all ranks, write `meta` (any JSON value), rename the folder.

    Only rank 0 calls this function; it waits up to `timeout` seconds for the other ranks. Files in `temporary` are
    removed unless they belong to the checkpoint or their name is in `beside`. Return `folder`. Raise SaveError when a
    rank is missing or the pieces of a tensor do not tile it; `temporary` stays in that case.
    """
    temporary, folder = Path(temporary), Path(folder)
    refuse_link(temporary)
    if folder.exists():
        raise SaveError(f"{folder}: exists, and a complete checkpoint is never overwritten; delete it to save again")
    try:
        parts = _collect(temporary, ranks, attempt, timeout)
        index = {"format": FORMAT, "files": [part["file"] for part in parts], "tensors": _merge(temporary, parts)}
        _check_sizes(temporary, index)
        write_sealed(temporary / "meta.json", {"meta": dict(meta)})
        write_sealed(temporary / "index.json", index)
        _remove_others(temporary, {"meta.json", "index.json", *(part["file"]["name"] for part in parts), *beside})
        sync_folder(temporary)
        temporary.rename(folder)
        sync_folder(folder.parent)
    except (OSError, ValueError) as error:
        raise SaveError(f"{folder}: the checkpoint cannot be completed: {error}") from error
    return folder


def write_sealed(path: Path, content: Mapping[str, Any]) -> None:
    """Write `content` to disk as JSON whose last key is the CRC-32 of the preceding text.

    The content is synced to disk; the name `path` is durable after the next sync of its folder.
    """
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()[:-1]
    draft = path.with_name(path.name + ".part")
    with open_new(draft, "wb", buffering=0) as file:
        _write_all(file, memoryview(text + (_SEAL % zlib.crc32(text)).encode()))
        os.fsync(file.fileno())
    # Sync the folder before the rename: rank 0 may rename the folder as soon as it sees this rank's index.
    sync_folder(path.parent)
    draft.rename(path)


def read_sealed(path: Path) -> dict[str, Any]:
    """Return the content that `write_sealed` wrote; raise ValueError when the file has no valid checksum."""
    raw = read_regular(path, MAX_INDEX_BYTES)
    text, seal, _ = raw.rpartition(_SEAL[:12].encode())
    if not seal or raw != text + (_SEAL % zlib.crc32(text)).encode():
        raise ValueError(f"its {len(raw)} bytes do not match the checksum at its end")
    # Do not limit the number of values by less than the size: with thousands of ranks, there are millions of pieces.
    content: dict[str, Any] = strict_json(raw, Bounds(MAX_INDEX_BYTES, MAX_INDEX_BYTES))
    if not isinstance(content, dict):
        raise ValueError("it is not a JSON object")
    return content


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor (any dtype and shape) as bytes, without a copy."""
    import torch

    return tensor.reshape(-1).view(torch.uint8).numpy().data


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of `dtype` without "torch."."""
    return str(dtype).removeprefix("torch.")


def block_rows(row_bytes: int) -> int:
    """Return the rows of a block: as many full rows as fit in `BLOCK_BYTES`, at least one."""
    return max(1, BLOCK_BYTES // max(row_bytes, 1))


def blocks(rows: int, row_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield the rows (low, high) of each block of a piece; `high` is exclusive."""
    step = block_rows(row_bytes)
    return ((low, min(low + step, rows)) for low in range(0, rows, step))


class Blank(NamedTuple):
    """A `Piece` without data. `extent`: the rectangle's shape; `dtype`: torch's name of the dtype."""

    name: str
    shape: tuple[int, ...]
    start: tuple[int, ...]
    extent: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """The bytes of the piece."""
        return math.prod(self.extent) * ITEMSIZE[self.dtype]


def lay_out(blanks: Sequence[Blank]) -> tuple[list[dict[str, Any]], bytes]:
    """Return the index entries of the pieces, in file order and without checksums, and the safetensors header."""
    # The largest item size comes first, because other readers need every tensor to start at a multiple of its item
    # size.
    ordered = sorted(blanks, key=lambda blank: (-ITEMSIZE[blank.dtype], blank.name, blank.start))
    header: dict[str, Any] = {"__metadata__": {"format": "pt", "kumi": str(FORMAT)}}
    entries: list[dict[str, Any]] = []
    offset = 0
    for blank in ordered:
        key, dtype, size = _key(blank), DTYPES[blank.dtype], blank.nbytes
        assert key not in header, f"one rank wrote the piece {key} twice"
        header[key] = {"dtype": dtype, "shape": list(blank.extent), "data_offsets": [offset, offset + size]}
        entries.append(
            {
                "name": blank.name,
                "dtype": dtype,
                "shape": list(blank.shape),
                "start": list(blank.start),
                "extent": list(blank.extent),
                "offset": offset,
            }
        )
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    raw = len(text).to_bytes(8, "little") + text
    for entry in entries:
        entry["offset"] += len(raw)
    return entries, raw


def write_index(shard: Path, rank: int, entries: Sequence[Mapping[str, Any]], header: bytes, attempt: str = "") -> None:
    """Write the index of `shard` next to it, for `commit` to read; `shard` must be complete on disk."""
    file = {"name": shard.name, "size": shard.stat().st_size, "header": len(header), "crc32": zlib.crc32(header)}
    index = {"format": FORMAT, "attempt": attempt, "rank": rank, "file": file, "pieces": list(entries)}
    write_sealed(shard.with_suffix(".json"), index)


def _write_shard(file: BinaryIO, pieces: Sequence[Piece]) -> tuple[list[dict[str, Any]], bytes]:
    """Write `pieces` to `file` as safetensors; return their index entries and the header."""
    data = {(piece.name, tuple(piece.start)): piece.data for piece in pieces}
    entries, header = lay_out(
        [
            Blank(piece.name, piece.shape, tuple(piece.start), tuple(piece.data.shape), dtype_name(piece.data.dtype))
            for piece in pieces
        ]
    )
    _write_all(file, memoryview(header))
    for entry in entries:
        entry["crc32"] = _write_tensor(file, data[entry["name"], tuple(entry["start"])])
    return entries, header


def _write_tensor(file: BinaryIO, data: torch.Tensor) -> list[int]:
    """Write `data` to `file`; return the CRC-32 of each of its blocks."""
    view = as_bytes(data.detach().cpu().contiguous())
    rows = data.shape[0] if data.dim() else 1
    row_bytes = len(view) // rows if rows else 0
    sums = []
    for low, high in blocks(rows, row_bytes):
        block = view[low * row_bytes : high * row_bytes]
        sums.append(zlib.crc32(block))
        _write_all(file, block)
    return sums


def _write_all(file: BinaryIO, view: memoryview) -> None:
    while view:
        view = view[file.write(view) :]


def _key(blank: Blank) -> str:
    """Return the piece's name in the safetensors file.

    A piece that is a full tensor has the tensor's name, under which other readers look for it. Other pieces have the
    index ranges in addition.
    """
    if tuple(blank.extent) == tuple(blank.shape):
        return blank.name
    box = ",".join(f"{low}:{low + count}" for low, count in zip(blank.start, blank.extent))
    return f"{blank.name}[{box}]"


def _assert_inside(piece: Piece) -> None:
    """Assert that the piece lies inside its tensor, and that its dtype can be written."""
    box = list(zip(piece.start, piece.data.shape, piece.shape))
    assert len(piece.start) == piece.data.dim() == len(piece.shape), (
        f"{piece.name}: start, data and shape differ in dims"
    )
    assert all(low >= 0 and low + count <= size for low, count, size in box), (
        f"{piece.name}: {box} is outside the tensor"
    )
    assert dtype_name(piece.data.dtype) in DTYPES, f"{piece.name}: {piece.data.dtype} has no safetensors name"


def _collect(temporary: Path, ranks: int, attempt: str, timeout: float) -> list[dict[str, Any]]:
    """Poll `temporary` until the indexes of all ranks exist; return them in order of rank.

    Raise SaveError after `timeout` seconds, or when a rank has reported a failure.
    """
    deadline = time.monotonic() + timeout
    pause = 0.01
    indexes: dict[int, dict[str, Any]] = {}
    while True:
        names = set(os.listdir(temporary))  # network file systems cache the absence of a single name, not a listing
        for rank in range(ranks):
            if rank not in indexes and f"shard_{rank:05d}.json" in names:
                index = read_sealed(temporary / f"shard_{rank:05d}.json")
                if index["attempt"] == attempt:
                    indexes[rank] = index
        for name in sorted(name for name in names if name.startswith("failed_") and name.endswith(".json")):
            note = read_sealed(temporary / name)
            if note["attempt"] == attempt:
                raise SaveError(note["error"])
        if len(indexes) == ranks:
            return [indexes[rank] for rank in range(ranks)]
        if time.monotonic() >= deadline:
            missing = ", ".join(str(rank) for rank in range(ranks) if rank not in indexes)
            raise SaveError(f"{temporary}: after {timeout:.0f} s the part of rank {missing} is missing; see its log")
        time.sleep(pause)
        pause = min(pause * 1.5, 0.5)


def _merge(temporary: Path, parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the dtype, shape and pieces of each tensor by name; raise SaveError unless the pieces tile it."""
    tensors: dict[str, Any] = {}
    for part in parts:
        for entry in part["pieces"]:
            name = entry["name"]
            tensor = tensors.setdefault(name, {"dtype": entry["dtype"], "shape": entry["shape"], "pieces": []})
            if (tensor["dtype"], tensor["shape"]) != (entry["dtype"], entry["shape"]):
                raise SaveError(
                    f"{temporary}: {name!r} is {tensor['dtype']} {tuple(tensor['shape'])} on one rank, "
                    f"{entry['dtype']} {tuple(entry['shape'])} on rank {part['rank']}"
                )
            position = {key: entry[key] for key in ("start", "extent", "offset", "crc32")}
            tensor["pieces"].append({"file": part["file"]["name"], **position})
    for name, tensor in tensors.items():
        problem = tiling_problem([(piece["start"], piece["extent"]) for piece in tensor["pieces"]], tensor["shape"])
        if problem:
            raise SaveError(f"{temporary}: the pieces of {name!r} {tuple(tensor['shape'])} do not tile it: {problem}")
    return tensors


_Box = tuple[tuple[int, int], ...]  # (start, extent) of each dim


def tiling_problem(boxes: Sequence[tuple[Sequence[int], Sequence[int]]], shape: Sequence[int]) -> str | None:
    """Return why boxes of (start, extent) do not cover each index of `shape` exactly once, or None if they do cover
    it."""
    if math.prod(shape) == 0:
        return None
    return _tiling_problem([tuple(zip(start, extent)) for start, extent in boxes], tuple(shape), ())


def _tiling_problem(boxes: list[_Box], shape: tuple[int, ...], at: tuple[int, ...]) -> str | None:
    """Sweep the first dim over all box edges, and recurse: the boxes between two edges must tile the other dims.

    `at` is the current index in the dims already swept.
    """
    if not shape:
        position = f"index {at}" if at else "the only element"
        return None if len(boxes) == 1 else f"{position} is in {len(boxes)} pieces"
    upcoming = sorted(boxes, reverse=True)
    edges = sorted({0, shape[0]}.union(*({low, low + count} for ((low, count), *_) in boxes)))
    active: list[_Box] = []
    for low in edges[:-1]:
        active = [box for box in active if sum(box[0]) > low]
        while upcoming and upcoming[-1][0][0] <= low:
            active.append(upcoming.pop())
        problem = _tiling_problem([box[1:] for box in active], shape[1:], (*at, low))
        if problem:
            return problem
    return None


def _check_sizes(temporary: Path, index: Mapping[str, Any]) -> None:
    """Raise SaveError unless each shard has the size on disk that its rank wrote."""
    for file in index["files"]:
        size = (temporary / file["name"]).stat().st_size
        if size != file["size"]:
            raise SaveError(f"{temporary / file['name']}: {size} bytes on disk, {file['size']} were written")


def _remove_others(temporary: Path, keep: set[str]) -> None:
    """Remove all files except those in `keep`: the ranks' indexes, now merged, and leftovers of a dead launch."""
    for path in temporary.iterdir():
        if path.name not in keep:
            path.unlink()
