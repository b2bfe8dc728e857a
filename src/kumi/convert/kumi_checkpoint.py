"""Read and write models as kumi checkpoints: tensors "model/<parameter>", and the config.json of the model.

A piece is a rectangle of a tensor, such as the one that a rank holds. A `Blank` describes a piece without its data, and
an entry is the piece's description in the index of a checkpoint's file.
"""

from __future__ import annotations

import shutil
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kumi.convert.files import stream
from kumi.convert.files.byte_runs import Run, Sums, Wrote
from kumi.convert.files.safetensors_read import Span
from kumi.convert.files.safetensors_write import sync
from kumi.convert.files.slices import Dims, flat_index, is_contiguous
from kumi.convert.files.stream import Job, Move, Reader, Runs, ThreadBuffers, copy_job, write_at
from kumi.convert.hf import passthrough as passthrough_files
from kumi.convert.hf import write_folder
from kumi.errors import ConfigError, ModelError, RefusedError
from kumi.files.output import remove_tree
from kumi.spec.families._shared import quantization
from kumi.spec.layout import Layout
from kumi.spec.ledger import buffers, tensors
from kumi.spec.model import ModelSpec
from kumi.spec.saved_tensors import CRITIC_PREFIX, model_shapes
from kumi.spec.saved_tensors import MODEL_PREFIX as PREFIX
from kumi.spec.shard_slices import slices
from kumi.spec.sharding import rank_params
from kumi.storage import checkpoint
from kumi.storage.write import ITEMSIZE, Blank, as_bytes, block_rows, blocks, lay_out, write_index

if TYPE_CHECKING:  # copying bytes needs no torch, which takes seconds to import
    from torch import Tensor

# Most bytes of a file (but one piece at least), in a checkpoint whose layout has one rank.
_SHARD_BYTES = 10**9


@dataclass(frozen=True)
class SavedModel:
    """An open checkpoint as a model."""

    checkpoint: checkpoint.Checkpoint

    @property
    def config(self) -> Mapping[str, Any]:
        """The model's config.json, without the quantization of the weights that training began from."""
        return quantization.without_quantization(self.checkpoint.meta["hf_config"])

    @property
    def tokenizer(self) -> Path | None:
        """The folder of the tokenizer; None if the checkpoint names none.

        It is the folder that the checkpoint names. If that is gone, because the run has moved or was brought from a
        store, it is the copy in the run's folder, if there is one.
        """
        named, run = self.checkpoint.meta.get("tokenizer"), self.checkpoint.folder.absolute().parent.parent
        if not named:
            return None
        copies = (folder for folder in (run / "data" / "tokenizer", run / "tokenizer") if folder.is_dir())
        return Path(named) if Path(named).is_dir() else next(copies, Path(named))

    @property
    def passthrough_source(self) -> str | None:
        """The Hugging Face folder with the passthrough tensors, if the checkpoint does not have them."""
        folder: str | None = self.checkpoint.meta.get("carried_from")
        return folder

    def dtype(self, name: str) -> str:
        """Return the dtype of a parameter or buffer."""
        return self.checkpoint.tensors[PREFIX + name].dtype_name


def is_checkpoint(folder: Path) -> bool:
    """True if `folder` looks like a kumi checkpoint, intact or damaged."""
    return (folder / "meta.json").exists() or (folder / "index.json").exists()


def open_saved_model(folder: Path, *, critic: bool = False) -> SavedModel:
    """Open the model in the checkpoint `folder`, or the `critic` of the run that saved it.

    Raise RefusedError for damage, ModelError for a missing hf_config, ConfigError for a missing critic.
    """
    saved = SavedModel(_critic_in(checkpoint.open(folder)) if critic else checkpoint.open(folder))
    if not isinstance(saved.checkpoint.meta.get("hf_config"), dict):
        raise ModelError(
            f"{folder}: its meta.json has no hf_config; name a checkpoint that kumi train or kumi convert wrote"
        )
    return saved


def _critic_in(saved: checkpoint.Checkpoint) -> checkpoint.Checkpoint:
    """Return the critic in the checkpoint `saved` as if it were the model of a checkpoint of its own."""
    about = saved.meta.get("critic")
    if not isinstance(about, dict):
        raise ConfigError(
            f"{saved.folder}: has no critic, as its run trained none; leave --critic out to convert its model"
        )
    stored = saved.tensors.items()
    tensors = {name.removeprefix(CRITIC_PREFIX): each for name, each in stored if name.startswith(CRITIC_PREFIX)}
    return replace(saved, meta={**saved.meta, **about}, tensors=tensors)


def check_tensors(saved: SavedModel, spec: ModelSpec) -> None:
    """Raise RefusedError for a tensor that is missing, unknown or of another shape than in `spec`.

    Where the checkpoint holds adapters only, `spec.lora` must be set. Raise ModelError for a tensor whose dtype is not
    floating point.
    """
    expected = model_shapes(spec)
    if difference := saved.checkpoint.difference(expected, PREFIX):
        raise RefusedError(f"{saved.checkpoint.folder}: {difference} of its hf_config; restore the checkpoint")
    dtypes = {name: saved.checkpoint.tensors[name].dtype_name for name in expected}
    non_float = [name for name, dtype in dtypes.items() if "float" not in dtype]
    if non_float:
        raise ModelError(
            f"{saved.checkpoint.folder}: {non_float[0]!r} is torch.{dtypes[non_float[0]]}, and weights must be "
            f"floating point; restore the checkpoint"
        )


def checkpoint_reader(saved: SavedModel, spec: ModelSpec) -> Reader:
    """Return a reader of the model's tensors; checksums are verified before bytes are used."""
    source = saved.checkpoint

    def read_into(name: str, start: Dims, out: Tensor) -> None:
        source.read_into(out, PREFIX + name, start)

    dtypes = {param.name: saved.dtype(param.name) for param in tensors(spec)}
    return Reader(dtypes, read_into, lambda name, row: source.block_end(PREFIX + name, row), partial(_runs, source))


def _runs(source: checkpoint.Checkpoint, name: str) -> Runs | None:
    """Return a function that lists a tensor's blocks in element order; None if a piece has only parts of rows."""
    stored = source.tensors[PREFIX + name]
    contiguous = all(is_contiguous(stored.shape, piece.extent) for piece in stored.pieces)
    return partial(_blocks, source, name) if contiguous else None


def _blocks(source: checkpoint.Checkpoint, name: str) -> Iterator[Run]:
    """Yield the blocks of a tensor in element order, each with its checksum."""
    stored = source.tensors[PREFIX + name]
    for piece in sorted(stored.pieces, key=lambda piece: flat_index(stored.shape, piece.start)):
        for offset, nbytes, crc32 in source.blocks(PREFIX + name, piece):
            check = partial(source.compare, piece.file, repr(PREFIX + name), written=crc32)
            yield Run(source.folder / piece.file, offset, nbytes, partial(source.opened, piece.file), check)


def write_model(
    folder: Path,
    spec: ModelSpec,
    source: Reader,
    *,
    dtypes: Mapping[str, str],
    layout: Layout,
    meta: Mapping[str, Any],
    passthrough: Mapping[str, Span],
) -> None:
    """Write a checkpoint of the model `source` into `folder` (absent or empty), in the pieces of the ranks of `layout`.

    With a layout of one rank the pieces are entire tensors, in files of about `_SHARD_BYTES`. `passthrough` tensors are
    copied unchanged.
    """
    staging = write_folder.staging_folder(folder)
    remove_tree(staging)
    if folder.exists():
        folder.rmdir()
    staging.mkdir(parents=True)
    try:
        shards = _assign_files(_all_pieces(spec, layout, dtypes), layout)
        layouts = [lay_out(shard) for shard in shards]
        jobs: list[Job] = []
        for rank, (entries, header) in enumerate(layouts):
            file = _shard_path(staging, rank)
            size = sum(blank.nbytes for blank in shards[rank])
            with file.open("wb") as output:
                output.write(header)
                output.truncate(len(header) + size)
            jobs += [_piece_job(file, entry, blank.dtype, source) for entry, blank in _by_entry(entries, shards[rank])]
        stream.run(jobs, str(folder))
        if passthrough:
            passthrough_files.write_spans(staging / passthrough_files.FILE, passthrough)
            sync(staging / passthrough_files.FILE)
        for rank, (entries, header) in enumerate(layouts):
            sync(_shard_path(staging, rank))
            write_index(_shard_path(staging, rank), rank, entries, header)
        checkpoint.commit(staging, folder, meta, ranks=len(layouts), beside=(passthrough_files.FILE,))
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def _shard_path(folder: Path, rank: int) -> Path:
    return folder / f"shard_{rank:05d}.safetensors"


def _all_pieces(spec: ModelSpec, layout: Layout, dtypes: Mapping[str, str]) -> list[tuple[Blank, list[int]]]:
    """Return the distinct pieces of the model under `layout`, each with the ranks that hold it."""
    holders: dict[Blank, list[int]] = {}
    buffer_names = {param.name for param in buffers(spec)}
    for param in buffers(spec):
        zeros = (0,) * len(param.shape)
        blank = Blank(PREFIX + param.name, param.shape, zeros, param.shape, dtypes[param.name])
        holders[blank] = list(range(layout.world_size))
    for rank in range(layout.world_size):
        for param in rank_params(spec, layout, rank):
            for region in () if param.name in buffer_names else slices(param, layout, rank):
                blank = Blank(PREFIX + param.name, param.shape, region.start, region.shape, dtypes[param.name])
                holders.setdefault(blank, []).append(rank)
    return list(holders.items())


def _assign_files(pieces: Sequence[tuple[Blank, list[int]]], layout: Layout) -> list[list[Blank]]:
    """Assign the pieces to files.

    With one rank, fill files in order. With several ranks, there is one file per rank; the largest piece comes first,
    and each piece goes to the file of that rank, among those that hold the piece, which has the fewest bytes so far.
    """
    if layout.world_size == 1:
        return list(_split_in_order([blank for blank, _ in pieces]))
    load = [0] * layout.world_size
    shards: list[list[Blank]] = [[] for _ in load]
    for blank, ranks in sorted(pieces, key=lambda piece: -prod(piece[0].extent)):
        rank = min(ranks, key=lambda rank: load[rank])
        load[rank] += blank.nbytes
        shards[rank].append(blank)
    return shards


def _split_in_order(blanks: Sequence[Blank]) -> Iterator[list[Blank]]:
    """Split the pieces, in order, into lists of at most `_SHARD_BYTES` (or one piece).

    There is a list for each thread at least, unless these would have less than 1 MiB each.
    """
    total = sum(blank.nbytes for blank in blanks)
    limit = min(_SHARD_BYTES, max(2**20, -(-total // stream.num_threads())))
    current: list[Blank] = []
    size = 0
    for blank in blanks:
        if current and size + blank.nbytes > limit:
            yield current
            current, size = [], 0
        current.append(blank)
        size += blank.nbytes
    yield current


def _by_entry(entries: Sequence[dict[str, Any]], shard: Sequence[Blank]) -> Iterator[tuple[dict[str, Any], Blank]]:
    """Pair each entry of a file with its piece in `shard`."""
    by_key = {(blank.name, blank.start): blank for blank in shard}
    return ((entry, by_key[entry["name"], tuple(entry["start"])]) for entry in entries)


def _piece_job(file: Path, entry: dict[str, Any], dtype: str, source: Reader) -> Job:
    """Return the job that writes a piece and stores the checksums of its blocks in `entry`."""
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
    """Return the job that writes a piece by reading it as a tensor, a few rows at a time."""
    name, start, extent = entry["name"].removeprefix(PREFIX), tuple(entry["start"]), tuple(entry["extent"])
    row_bytes = prod(extent[1:]) * ITEMSIZE[dtype]
    step, rows = block_rows(row_bytes), extent[0]
    entry["crc32"] = []

    def work(handle: int, buffers: ThreadBuffers, wrote: Wrote) -> None:
        row = 0
        while row < rows:
            block_end = source.block_end(name, start[0] + row) - start[0]
            end = min(rows, row + -(-max(1, block_end - row) // step) * step)
            data = buffers.rows(source, name, (start[0] + row, *start[1:]), (end - row, *extent[1:]), dtype)
            entry["crc32"] += [zlib.crc32(as_bytes(data[low:high])) for low, high in blocks(end - row, row_bytes)]
            write_at(handle, data, entry["offset"] + row * row_bytes)
            wrote(data.nbytes)
            row = end

    return Job(file, rows * row_bytes, work, whole=source.block_end(name, start[0]) - start[0] >= rows)
