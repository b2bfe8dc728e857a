"""Writing a checkpoint: one safetensors file a rank, and one index that says where each piece of each tensor is.

Each rank writes `shard_00003.safetensors`, its pieces in the plain safetensors format, and then `shard_00003.json`,
which lists them. Rank 0 waits for these lists, checks that the pieces of each tensor tile it, merges the lists into
`index.json`, adds `meta.json`, and renames the folder. Everything is on the disk (fsync) before the name changes, so
a process that is killed at any instant leaves either a whole checkpoint or none.

Each piece has one CRC-32 for each `BLOCK_BYTES` of whole rows, so a reader verifies what it touches without reading
or holding more. The header of each shard has a CRC-32 in the index, and each JSON file ends in one of its own text.
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

if TYPE_CHECKING:  # bytes are copied without torch, which takes seconds to import
    import torch

FORMAT = 1
BLOCK_BYTES = 4 * 2**20
# An index has a checksum for each block: a terabyte of tensors has 250,000, in 3 MB of JSON.
MAX_INDEX_BYTES = 2 * 10**9
_SEAL = ',\n"crc32": "%08x"}\n'

# By torch's names of dtypes: safetensors' names, and the bytes of an element.
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
    """A rectangular piece `data` of the global tensor `name` of `shape`, from the indices `start` on."""

    name: str
    shape: tuple[int, ...]
    start: tuple[int, ...]
    data: torch.Tensor


def write_pieces(folder: Path | str, rank: int, pieces: Sequence[Piece], *, attempt: str = "") -> None:
    """Nothing, when the pieces of `rank` and their index are on the disk in `folder` (a `.tmp` one).

    `attempt` is any text that all ranks of one launch share and no other launch has: a commit takes no index of
    another attempt, which a dead launch may have left in the folder. Raises SaveError.
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
    """`folder`, complete: `temporary` with the parts of all `ranks` and `meta` (anything JSON can hold), renamed.

    Files in it stay that have names in `beside`. For rank 0 alone. Waits up to `timeout` seconds for the other ranks.
    Raises SaveError when a part is missing or the pieces of a tensor do not tile it; `temporary` is left as it is then.
    """
    temporary, folder = Path(temporary), Path(folder)
    refuse_link(temporary)
    if folder.exists():
        raise SaveError(f"{folder}: exists, and a complete checkpoint is never overwritten; delete it to save it again")
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
    """Nothing, when `content` is on the disk as JSON whose last key is the CRC-32 of the text before it.

    The name `path` itself is on the disk when its folder is synced next.
    """
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()[:-1]
    draft = path.with_name(path.name + ".part")
    with open_new(draft, "wb", buffering=0) as file:
        _write_all(file, memoryview(text + (_SEAL % zlib.crc32(text)).encode()))
        os.fsync(file.fileno())
    # The folder first: once the index has its name, rank 0 may rename the folder under this rank's feet.
    sync_folder(path.parent)
    draft.rename(path)


def read_sealed(path: Path) -> dict[str, Any]:
    """What `write_sealed` wrote; ValueError with the reason when the file is not that."""
    raw = read_regular(path, MAX_INDEX_BYTES)
    text, mark, _ = raw.rpartition(_SEAL[:12].encode())
    if not mark or raw != text + (_SEAL % zlib.crc32(text)).encode():
        raise ValueError(f"its {len(raw)} bytes do not match the checksum at its end")
    # As many values as the bytes can say: a checkpoint of thousands of ranks has millions of pieces.
    content: dict[str, Any] = strict_json(raw, Bounds(MAX_INDEX_BYTES, MAX_INDEX_BYTES))
    if not isinstance(content, dict):
        raise ValueError("it is no object")
    return content


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor of any dtype and shape."""
    import torch

    return tensor.reshape(-1).view(torch.uint8).numpy().data


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of `dtype` without the module that it is in."""
    return str(dtype).removeprefix("torch.")


def block_rows(row_bytes: int) -> int:
    """Rows of a block of a piece: as many whole ones as `BLOCK_BYTES` hold, at least one."""
    return max(1, BLOCK_BYTES // max(row_bytes, 1))


def blocks(rows: int, row_bytes: int) -> Iterator[tuple[int, int]]:
    """First and last-plus-one row of each block of a piece."""
    step = block_rows(row_bytes)
    return ((low, min(low + step, rows)) for low in range(0, rows, step))


class Blank(NamedTuple):
    """A rectangle of the global tensor `name` of `shape` whose data are still to come; `dtype` is torch's name."""

    name: str
    shape: tuple[int, ...]
    start: tuple[int, ...]
    extent: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.extent) * ITEMSIZE[self.dtype]


def lay_out(blanks: Sequence[Blank]) -> tuple[list[dict[str, Any]], bytes]:
    """The index entries, still without checksums, in the order of their bytes, and the header of a safetensors file
    with these pieces."""
    # Wide dtypes first: every tensor then starts at a multiple of its item size, which other readers rely on.
    ordered = sorted(blanks, key=lambda blank: (-ITEMSIZE[blank.dtype], blank.name, blank.start))
    header: dict[str, Any] = {"__metadata__": {"format": "pt", "kumi": str(FORMAT)}}
    entries: list[dict[str, Any]] = []
    offset = 0
    for blank in ordered:
        key, dtype, size = _key(blank), DTYPES[blank.dtype], blank.nbytes
        assert key not in header, f"{key} is given twice by one rank"
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
    """Nothing, when what `shard`, which is on the disk, holds is noted beside it, for a commit to find."""
    file = {"name": shard.name, "size": shard.stat().st_size, "header": len(header), "crc32": zlib.crc32(header)}
    index = {"format": FORMAT, "attempt": attempt, "rank": rank, "file": file, "pieces": list(entries)}
    write_sealed(shard.with_suffix(".json"), index)


def _write_shard(file: BinaryIO, pieces: Sequence[Piece]) -> tuple[list[dict[str, Any]], bytes]:
    """The index entries and the header of a safetensors file with `pieces`, once they are in `file`."""
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
    """The CRC-32 of each block of `data`, once it is in `file`."""
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
    """The tensor's own name where the piece is all of it, so that other readers find it; else with its box."""
    if tuple(blank.extent) == tuple(blank.shape):
        return blank.name
    box = ",".join(f"{low}:{low + count}" for low, count in zip(blank.start, blank.extent))
    return f"{blank.name}[{box}]"


def _assert_inside(piece: Piece) -> None:
    box = list(zip(piece.start, piece.data.shape, piece.shape))
    assert len(piece.start) == piece.data.dim() == len(piece.shape), (
        f"{piece.name}: start, data and shape differ in dims"
    )
    assert all(low >= 0 and low + count <= whole for low, count, whole in box), f"{piece.name}: {box} leaves the tensor"
    assert dtype_name(piece.data.dtype) in DTYPES, f"{piece.name}: {piece.data.dtype} has no safetensors name"


def _collect(temporary: Path, ranks: int, attempt: str, timeout: float) -> list[dict[str, Any]]:
    """The index of each rank, in order of rank, as soon as all are there."""
    deadline = time.monotonic() + timeout
    pause = 0.01
    found: dict[int, dict[str, Any]] = {}
    while True:
        names = set(os.listdir(temporary))  # a listing, because network file systems remember that a name was absent
        for rank in range(ranks):
            if rank not in found and f"shard_{rank:05d}.json" in names:
                part = read_sealed(temporary / f"shard_{rank:05d}.json")
                if part["attempt"] == attempt:
                    found[rank] = part
        for name in sorted(name for name in names if name.startswith("failed_") and name.endswith(".json")):
            note = read_sealed(temporary / name)
            if note["attempt"] == attempt:
                raise SaveError(note["error"])
        if len(found) == ranks:
            return [found[rank] for rank in range(ranks)]
        if time.monotonic() >= deadline:
            missing = ", ".join(str(rank) for rank in range(ranks) if rank not in found)
            raise SaveError(f"{temporary}: after {timeout:.0f} s the part of rank {missing} is missing; see its log")
        time.sleep(pause)
        pause = min(pause * 1.5, 0.5)


def _merge(temporary: Path, parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Tensor name to dtype, shape and pieces; SaveError when they do not fit together."""
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
            where = {key: entry[key] for key in ("start", "extent", "offset", "crc32")}
            tensor["pieces"].append({"file": part["file"]["name"], **where})
    for name, tensor in tensors.items():
        problem = tiling_problem([(piece["start"], piece["extent"]) for piece in tensor["pieces"]], tensor["shape"])
        if problem:
            raise SaveError(f"{temporary}: the pieces of {name!r} {tuple(tensor['shape'])} do not tile it: {problem}")
    return tensors


_Box = tuple[tuple[int, int], ...]  # (start, extent) of each dim


def tiling_problem(boxes: Sequence[tuple[Sequence[int], Sequence[int]]], shape: Sequence[int]) -> str | None:
    """What keeps boxes of (start, extent) from covering each index of `shape` exactly once; None when nothing does."""
    if math.prod(shape) == 0:
        return None
    return _tiling_problem([tuple(zip(start, extent)) for start, extent in boxes], tuple(shape), ())


def _tiling_problem(boxes: list[_Box], shape: tuple[int, ...], at: tuple[int, ...]) -> str | None:
    """Sweeps the first dim from cut to cut; the boxes over each such stretch must tile the other dims."""
    if not shape:
        where = f"index {at}" if at else "the one element"
        return None if len(boxes) == 1 else f"{where} is in {len(boxes)} pieces"
    waiting = sorted(boxes, reverse=True)
    cuts = sorted({0, shape[0]}.union(*({low, low + count} for ((low, count), *_) in boxes)))
    active: list[_Box] = []
    for low in cuts[:-1]:
        active = [box for box in active if sum(box[0]) > low]
        while waiting and waiting[-1][0][0] <= low:
            active.append(waiting.pop())
        problem = _tiling_problem([box[1:] for box in active], shape[1:], (*at, low))
        if problem:
            return problem
    return None


def _check_sizes(temporary: Path, index: Mapping[str, Any]) -> None:
    for file in index["files"]:
        size = (temporary / file["name"]).stat().st_size
        if size != file["size"]:
            raise SaveError(f"{temporary / file['name']}: {size} bytes on disk, {file['size']} were written")


def _remove_others(temporary: Path, wanted: set[str]) -> None:
    """Removes the ranks' own indexes, now merged, and what a dead launch with other ranks left here."""
    for path in temporary.iterdir():
        if path.name not in wanted:
            path.unlink()
