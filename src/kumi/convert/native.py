"""The model in a checkpoint of kumi: tensors "model/<parameter>", and the config.json it is exported with."""

from __future__ import annotations

import shutil
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kumi.convert import carried, hf_write, stream
from kumi.convert.rectangles import Dims, flat_index, is_contiguous
from kumi.convert.runs import Run, Sums, Wrote
from kumi.convert.safetensors_file import sync
from kumi.convert.safetensors_read import Span
from kumi.convert.stream import Job, Move, Reader, Runs, ThreadBuffers, copy_job, write_at
from kumi.errors import ModelError, RefusedError
from kumi.files.output import remove_tree
from kumi.spec.families import quantised
from kumi.spec.layout import Layout
from kumi.spec.ledger import buffers, tensors
from kumi.spec.model import ModelSpec
from kumi.spec.regions import regions
from kumi.spec.saved import MODEL as PREFIX
from kumi.spec.saved import model_shapes
from kumi.spec.sharding import held_params
from kumi.storage import checkpoint
from kumi.storage.write import ITEMSIZE, Blank, as_bytes, block_rows, blocks, lay_out, write_index

if TYPE_CHECKING:  # bytes are copied without torch, which takes seconds to import
    from torch import Tensor

SHARD_BYTES = 10**9


@dataclass(frozen=True)
class SavedModel:
    """An open checkpoint, seen as a model."""

    checkpoint: checkpoint.Checkpoint

    @property
    def config(self) -> Mapping[str, Any]:
        """Return the model's config.json, without how the weights that training began from were quantised."""
        return quantised.plain(self.checkpoint.meta["hf_config"])

    @property
    def tokenizer(self) -> Path | None:
        folder = self.checkpoint.meta.get("tokenizer")
        return Path(folder) if folder else None

    @property
    def carried_from(self) -> str | None:
        """The Hugging Face folder of what the model carries along, where that is not in the checkpoint."""
        found: str | None = self.checkpoint.meta.get("carried_from")
        return found

    def dtype(self, name: str) -> str:
        return self.checkpoint.tensors[PREFIX + name].dtype_name


def is_checkpoint(folder: Path) -> bool:
    """Whether `folder` looks like a checkpoint of kumi, whole or damaged."""
    return (folder / "meta.json").exists() or (folder / "index.json").exists()


def open_model(folder: Path) -> SavedModel:
    """The model in the checkpoint `folder`; RefusedError where it is damaged."""
    saved = SavedModel(checkpoint.open(folder))
    if not isinstance(saved.checkpoint.meta.get("hf_config"), dict):
        raise ModelError(f"{folder}: its meta.json has no hf_config; it was not written by kumi train or kumi convert")
    return saved


def check(saved: SavedModel, spec: ModelSpec) -> None:
    """Raise RefusedError for a tensor that is missing, unknown or of another shape than in `spec`, which has adapters
    where the checkpoint holds only these; ModelError for one that is not of floating-point numbers."""
    wanted = model_shapes(spec)
    if difference := saved.checkpoint.difference(wanted, PREFIX):
        raise RefusedError(f"{saved.checkpoint.folder}: {difference} of its hf_config; restore the checkpoint")
    dtypes = {name: saved.checkpoint.tensors[name].dtype_name for name in wanted}
    other = [name for name, dtype in dtypes.items() if "float" not in dtype]
    if other:
        raise ModelError(
            f"{saved.checkpoint.folder}: {other[0]!r} is torch.{dtypes[other[0]]}; weights are floating-point numbers"
        )


def reader(saved: SavedModel, spec: ModelSpec) -> Reader:
    """The model's tensors, each byte verified before it is used."""
    found = saved.checkpoint

    def read_into(name: str, start: Dims, out: Tensor) -> None:
        found.read_into(out, PREFIX + name, start)

    dtypes = {param.name: saved.dtype(param.name) for param in tensors(spec)}
    return Reader(dtypes, read_into, lambda name, row: found.cut(PREFIX + name, row), partial(_runs, found))


def _runs(found: checkpoint.Checkpoint, name: str) -> Runs | None:
    """What lists the blocks of a tensor, in the order of its elements; None where a piece has only parts of rows."""
    stored = found.tensors[PREFIX + name]
    whole = all(is_contiguous(stored.shape, piece.extent) for piece in stored.pieces)
    return partial(_blocks, found, name) if whole else None


def _blocks(found: checkpoint.Checkpoint, name: str) -> Iterator[Run]:
    stored = found.tensors[PREFIX + name]
    for piece in sorted(stored.pieces, key=lambda piece: flat_index(stored.shape, piece.start)):
        for offset, nbytes, crc32 in found.blocks(PREFIX + name, piece):
            check = partial(found.compare, piece.file, repr(PREFIX + name), written=crc32)
            yield Run(found.folder / piece.file, offset, nbytes, partial(found.opened, piece.file), check)


def write_model(
    folder: Path,
    spec: ModelSpec,
    source: Reader,
    *,
    dtypes: Mapping[str, str],
    layout: Layout,
    meta: Mapping[str, Any],
    beside: Mapping[str, Span],
) -> None:
    """Write `folder` (absent or empty), a checkpoint of a model alone, in the pieces that the ranks of `layout` hold.

    With a layout of one rank the pieces are whole tensors, in files of about `SHARD_BYTES`. `beside` is what the model
    carries along.
    """
    temporary = hf_write.unfinished(folder)
    remove_tree(temporary)
    if folder.exists():
        folder.rmdir()
    temporary.mkdir(parents=True)
    try:
        shards = _shards(_pieces(spec, layout, dtypes), layout)
        laid = [lay_out(shard) for shard in shards]
        jobs: list[Job] = []
        for rank, (entries, header) in enumerate(laid):
            file = _file(temporary, rank)
            size = sum(blank.nbytes for blank in shards[rank])
            with file.open("wb") as opened:
                opened.write(header)
                opened.truncate(len(header) + size)
            jobs += [_job(file, entry, blank.dtype, source) for entry, blank in _by_entry(entries, shards[rank])]
        stream.run(jobs, str(folder))
        if beside:
            carried.write_spans(temporary / carried.FILE, beside)
            sync(temporary / carried.FILE)
        for rank, (entries, header) in enumerate(laid):
            sync(_file(temporary, rank))
            write_index(_file(temporary, rank), rank, entries, header)
        checkpoint.commit(temporary, folder, meta, ranks=len(laid), beside=(carried.FILE,))
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _file(folder: Path, rank: int) -> Path:
    return folder / f"shard_{rank:05d}.safetensors"


def _pieces(spec: ModelSpec, layout: Layout, dtypes: Mapping[str, str]) -> list[tuple[Blank, list[int]]]:
    """What the ranks of `layout` hold of the model, each piece once, with the ranks that hold it."""
    found: dict[Blank, list[int]] = {}
    whole = {param.name for param in buffers(spec)}
    for param in buffers(spec):
        zeros = (0,) * len(param.shape)
        blank = Blank(PREFIX + param.name, param.shape, zeros, param.shape, dtypes[param.name])
        found[blank] = list(range(layout.world_size))
    for rank in range(layout.world_size):
        for param in held_params(spec, layout, rank):
            for region in () if param.name in whole else regions(param, layout, rank):
                blank = Blank(PREFIX + param.name, param.shape, region.start, region.shape, dtypes[param.name])
                found.setdefault(blank, []).append(rank)
    return list(found.items())


def _shards(pieces: Sequence[tuple[Blank, list[int]]], layout: Layout) -> list[list[Blank]]:
    """The pieces of every file: of every rank, the holder with the fewest bytes taking each; of one rank, in order."""
    if layout.world_size == 1:
        return list(_in_order([blank for blank, _ in pieces]))
    load = [0] * layout.world_size
    shards: list[list[Blank]] = [[] for _ in load]
    for blank, ranks in sorted(pieces, key=lambda piece: -prod(piece[0].extent)):
        rank = min(ranks, key=lambda rank: load[rank])
        load[rank] += blank.nbytes
        shards[rank].append(blank)
    return shards


def _in_order(blanks: Sequence[Blank]) -> Iterator[list[Blank]]:
    """The pieces in lists of no more than `SHARD_BYTES` where a piece is no larger than that, and at least as many
    lists as there are threads to fill them."""
    total = sum(blank.nbytes for blank in blanks)
    limit = min(SHARD_BYTES, max(2**20, -(-total // stream.threads())))
    kept: list[Blank] = []
    size = 0
    for blank in blanks:
        if kept and size + blank.nbytes > limit:
            yield kept
            kept, size = [], 0
        kept.append(blank)
        size += blank.nbytes
    yield kept


def _by_entry(entries: Sequence[dict[str, Any]], shard: Sequence[Blank]) -> Iterator[tuple[dict[str, Any], Blank]]:
    known = {(blank.name, blank.start): blank for blank in shard}
    return ((entry, known[entry["name"], tuple(entry["start"])]) for entry in entries)


def _job(file: Path, entry: dict[str, Any], dtype: str, source: Reader) -> Job:
    """Writes a piece, and notes the checksums of its blocks in `entry`."""
    name = entry["name"].removeprefix(PREFIX)
    shape, start, extent = (tuple(entry[key]) for key in ("shape", "start", "extent"))
    runs = source.runs(name)
    if runs is None or not is_contiguous(shape, extent) or not prod(extent):
        return _rows_job(file, entry, dtype, source)
    row_bytes = prod(extent[1:]) * ITEMSIZE[dtype]
    sums = Sums(block_rows(row_bytes) * row_bytes)
    entry["crc32"] = sums.sums
    move = Move(flat_index(shape, start), prod(extent), entry["offset"], sums)
    return copy_job(file, runs, [move], source.dtypes[name], dtype)


def _rows_job(file: Path, entry: dict[str, Any], dtype: str, source: Reader) -> Job:
    """The same, a few rows at a time as a tensor."""
    name, start, extent = entry["name"].removeprefix(PREFIX), tuple(entry["start"]), tuple(entry["extent"])
    row_bytes = prod(extent[1:]) * ITEMSIZE[dtype]
    step, rows = block_rows(row_bytes), extent[0]
    entry["crc32"] = []

    def work(handle: int, buffers: ThreadBuffers, wrote: Wrote) -> None:
        row = 0
        while row < rows:
            cut = source.cut(name, start[0] + row) - start[0]
            end = min(rows, row + -(-max(1, cut - row) // step) * step)
            data = buffers.rows(source, name, (start[0] + row, *start[1:]), (end - row, *extent[1:]), dtype)
            entry["crc32"] += [zlib.crc32(as_bytes(data[low:high])) for low, high in blocks(end - row, row_bytes)]
            write_at(handle, data, entry["offset"] + row * row_bytes)
            wrote(data.nbytes)
            row = end

    return Job(file, rows * row_bytes, work, whole=source.cut(name, start[0]) - start[0] >= rows)
