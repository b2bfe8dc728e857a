"""The reference model's log-probs: computed once over the data and stored, and compared with the policy at step 0.

An objective that compares the policy with a reference needs only the reference's sum of log-probs over each sequence.
These sums are computed in the run's layout before the first step, and stored beside the tokens, so that no second model
is kept. They depend on the weights, the tokens and masks, the row length and the precision, but not on the layout; a
digest of these is in the file's name. An interrupted computation continues.

If the run file names no other reference, the policy before its first step is the reference. Then the sums of the policy
must equal the stored ones, up to rounding (`kumi.train.check_reference`).

A source has data on two sides, "train" and "validation". Each side has units: examples with one or several sequences,
such as a pair of replies. A packed row has the sequences of several units. The mismatched sequence of a unit is its
prompt with another unit's reply, which some objectives need (KTO).
"""

from __future__ import annotations

import hashlib
import os
import time
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import nn

from kumi.config import ResolvedRun
from kumi.convert.base_digest import base_digest
from kumi.data import Batch, SequentialSampler, Store
from kumi.data.binfile import Array
from kumi.data.packing import PackedRows
from kumi.data.reference_file import ReferenceSums, empty_sums, read_sums, reference_path, write_sums
from kumi.data.stored_source import References, StoredSource
from kumi.errors import RefusedError
from kumi.files.untrusted import inside, open_stream
from kumi.objectives import MISMATCHED, Objective
from kumi.parallel.mesh import Mesh, all_reduce_max, all_reduce_sum, barrier
from kumi.parallel.run_microbatches import adds_to_loss, evaluating, shard_batch, sum_sequences
from kumi.parallel.state_tensors import model_pieces, owned_pieces
from kumi.progress import show_progress
from kumi.spec.saved_tensors import model_digest
from kumi.train.step import as_tensors
from kumi.units import format_count

_SIDES = ("train", "validation")
# A part of the name of a stored file: raise it when the same inputs no longer give the same sums.
_VERSION = 1
# Seconds between writes of an unfinished file.
_WRITE_EVERY = 60.0


def lacks_references(run: ResolvedRun, store: Store, mesh: Mesh) -> bool:
    """Return True on all ranks if `run` needs stored sums, and some are missing on any rank."""
    missing = _stores_sums(run) and open_references(run, store) is None
    return bool(all_reduce_max(torch.tensor(float(missing), device=mesh.device), mesh))


def _stores_sums(run: ResolvedRun) -> bool:
    """Return True if `run` compares its policy with a reference whose sums are stored."""
    return run.config.objective.compares and run.config.reference.kind == "stored"


def open_references(run: ResolvedRun, store: Store) -> References | None:
    """Return the stored sums of every source and side of `store`; None if one is missing, or the run needs none."""
    if not _stores_sums(run):
        return None
    references: dict[tuple[str, str], tuple[Array, Array | None]] = {}
    for source, side in source_sides(store):
        units = store.open_units(source, side)
        sums = read_sums(sums_path(run, source, side), units.file.document_count, units.unit_count)
        if sums is None or not sums.complete:
            return None
        mismatched = run.config.objective.rows.mismatched
        references[source.name, side] = sums.sums, sums.mismatched if mismatched else None
    return references


def make_references(run: ResolvedRun, store: Store, mesh: Mesh, model: nn.Module, objective: Objective) -> None:
    """Compute and store the sums that are missing, by `model`, the reference, on all ranks together."""
    fingerprint = weights_fingerprint(model, mesh)
    for source, side in source_sides(store):
        form, seed = run.config.objective.rows, run.config.train.seed if side == "train" else 0
        [rows] = [
            rows
            for rows, name in zip(
                store.row_sources(side, run.batch.seq_len, seed, form),
                store.train_names if side == "train" else store.validation_names,
                strict=True,
            )
            if name == source.name
        ]
        assert isinstance(rows, PackedRows)
        path, sums = sums_path(run, source, side), _stored_so_far(run, source, side, rows) if mesh.rank == 0 else None
        done = int(all_reduce_sum(torch.tensor(float(0 if sums is None else sums.done)), mesh))
        if done < rows.rows:
            _compute(run, mesh, model, objective, rows, sums, done, _unfinished(path, seed), fingerprint)
        if sums is not None:
            write_sums(path, sums)
            _unfinished(path, seed).unlink(missing_ok=True)
    barrier(mesh)


def _stored_so_far(run: ResolvedRun, source: StoredSource, side: str, rows: PackedRows) -> ReferenceSums:
    """Return the sums of `side` of `source` that are stored already: of all rows, of the first ones, or of none."""
    path, seed = sums_path(run, source, side), run.config.train.seed if side == "train" else 0
    sequences, units = rows.source.file.document_count, len(rows.source.columns)
    # The order of rows depends on the seed, and so does the name of an unfinished file.
    for file in (path, _unfinished(path, seed)):
        try:
            stored = read_sums(file, sequences, units)
        except RefusedError:
            stored = None  # damaged: computed anew
        if stored is not None and (stored.complete or stored.rows == rows.rows):
            parts = (stored.sums, stored.trained, stored.tokens, stored.mismatched, stored.fingerprint)
            done = rows.rows if stored.complete else stored.done
            sums, trained, tokens, mismatched, fingerprint = map(np.array, parts)
            return ReferenceSums(sums, trained, tokens, mismatched, fingerprint, done, rows.rows)
    return empty_sums(sequences, units, rows.rows)


def _unfinished(path: Path, seed: int) -> Path:
    """Return the file of sums that are not complete yet, for the complete file `path`."""
    return Path(f"{path}.seed{seed}")


def _compute(
    run: ResolvedRun,
    mesh: Mesh,
    model: nn.Module,
    objective: Objective,
    rows: PackedRows,
    sums: ReferenceSums | None,
    done: int,
    unfinished: Path,
    fingerprint: Array,
) -> None:
    """Compute the sums of the rows from `done` on into `sums`, which rank 0 has, and store them now and then."""
    layout, sampler, written = run.layout, SequentialSampler([rows], run.batch.seq_len), time.monotonic()
    size = layout.microbatch
    per_call = size * layout.dp * (1 if layout.pp == 1 else 4 * layout.pp)
    with (
        show_progress("reference  log-probs", rows.rows, _rows_done, enabled=mesh.rank == 0) as update,
        evaluating(model),
    ):
        for first in range(done, rows.rows, per_call):
            stop = min(first + per_call, rows.rows)
            table = _rows_table(mesh, model, objective, sampler, rows, first, stop, size)
            if sums is None:
                continue
            _store_table(sums, rows, first, table.cpu().numpy(), mismatched=objective.rows.mismatched)
            sums.done, sums.fingerprint = stop, fingerprint
            if time.monotonic() > written + _WRITE_EVERY:
                write_sums(unfinished, sums)
                written = time.monotonic()
            update(stop)


def _rows_table(
    mesh: Mesh,
    model: nn.Module,
    objective: Objective,
    sampler: SequentialSampler,
    rows: PackedRows,
    first: int,
    stop: int,
    size: int,
) -> torch.Tensor:
    """Return a table (rows, sequences, 4) of the rows [first, stop), the same on every rank.

    Of the four numbers at place s of a row, three are of sequence s of the row: the sum of log-probs, the number of
    trained tokens, and the checksum of the tokens. The fourth is of unit s of the row: the sum of log-probs of its
    mismatched sequence.
    """
    layout = mesh.layout
    begins = range(first + layout.dp_index(mesh.rank) * size, stop, layout.dp * size)
    # All ranks run the same number of microbatches; rows past `stop` are padding.
    count = -(-(stop - first) // (layout.dp * size))
    starts = [*begins, *[stop] * (count - len(begins))]
    batches = [sampler.batch(start, size, stop) for start in starts]
    table = torch.zeros(stop - first, rows.most_sequences(np.arange(first, stop)), 4, dtype=torch.float64)
    table = table.to(mesh.device)
    sharded = [shard_batch(objective, as_tensors(batch), mesh) for batch in batches]
    parts = [sum_sequences(model, mesh, sharded)]
    if objective.rows.mismatched:
        parts.append(sum_sequences(model, mesh, sharded, MISMATCHED))
    for index, (start, batch) in enumerate(zip(starts, batches, strict=True)):
        here = slice(start - first, min(start + size, stop) - first)
        used = here.stop - here.start
        if used <= 0 or not parts[0] or not adds_to_loss(objective, mesh):
            continue
        sequences = min(table.shape[1], batch["trained"].shape[1])
        columns = [parts[0][index], *(torch.from_numpy(part).to(mesh.device) for part in token_checks(batch))]
        columns += [parts[1][index]] if objective.rows.mismatched else []
        for place, column in enumerate(columns):
            table[here, :sequences, place] = column[:used, :sequences].to(torch.float64)
    return all_reduce_sum(table, mesh)


def _store_table(sums: ReferenceSums, rows: PackedRows, first: int, table: Array, *, mismatched: bool) -> None:
    """Write the `table` (see `_rows_table`) of the rows from `first` on into `sums`, whose arrays count the sequences
    and units of the complete side."""
    for index, row in enumerate(table):
        units = rows.units_of(first + index)
        records = rows.source.columns[np.array(units)]
        places = zip(records["first_document"].tolist(), records["documents"].tolist(), strict=True)
        documents = np.concatenate([np.arange(begin, begin + count) for begin, count in places])
        used = row[: len(documents)]
        sums.sums[documents], sums.trained[documents], sums.tokens[documents] = used[:, 0], used[:, 1], used[:, 2]
        if mismatched:
            sums.mismatched[np.array(units)] = row[: len(units), 3]


def token_checks(batch: Batch) -> tuple[Array, Array]:
    """Return the number of trained tokens and the CRC-32 of the input tokens of each sequence of `batch`, (B, G)."""
    trained = batch["trained"].astype(np.float64)
    checksums = np.zeros_like(trained)
    for row, segments in enumerate(batch["segments"]):
        for sequence in np.flatnonzero(trained[row]):
            positions = (segments == sequence) & (batch["document_ids"][row] == sequence)
            checksums[row, sequence] = zlib.crc32(batch["input_ids"][row][positions].tobytes())
    return trained, checksums


def weights_fingerprint(model: nn.Module, mesh: Mesh) -> Array:
    """Return the sums of the absolute values and of the squares of all parameters, float64 (2,).

    They are equal in every layout, up to the rounding of float64 sums.
    """
    total = torch.zeros(2, dtype=torch.float64, device=mesh.device)
    for piece in owned_pieces(model_pieces(model, mesh), model, mesh):
        values = piece.data.detach()
        if values.is_floating_point():
            total += torch.stack([values.abs().sum(dtype=torch.float64), values.double().square().sum()])
    return np.asarray(all_reduce_sum(total, mesh).cpu().numpy())


def source_sides(store: Store) -> list[tuple[StoredSource, str]]:
    """Return the sources of `store` with each side that they have."""
    return [(source, side) for source in store.sources for side in _SIDES if getattr(source, side) is not None]


def sums_path(run: ResolvedRun, source: StoredSource, side: str) -> Path:
    """Return the file of the stored sums of `side` of `source`."""
    prefix: Path = getattr(source, side)
    return reference_path(prefix, _digest(run, getattr(source, f"{side}_digest")))


def _digest(run: ResolvedRun, content: str) -> str:
    """Return the digest of all that the sums depend on: the weights, the tokens and masks (`content`), the row length,
    the precision, and which rows are computed."""
    parts = [_VERSION, _weights_name(run), content, run.batch.seq_len, run.precision.compute, run.config.objective.rows]
    return hashlib.blake2b(repr(parts).encode(), digest_size=8).hexdigest()


def _weights_name(run: ResolvedRun) -> str:
    """Return a text that differs between different weights of the reference."""
    shape = model_digest(run.base)
    if run.reference_folder is not None:
        return f"{shape} {base_digest(run.reference_folder)}"
    if run.config.model.init != "pretrained" or run.source is None:
        return f"{shape} seed {run.config.train.seed}"
    adapters = run.config.lora.source if run.config.lora is not None else None
    added = "" if adapters is None else f" {_folder_digest(Path(os.path.expanduser(adapters)))}"
    quantized = "" if run.model.lora is None else f" {run.model.lora.quantize}"
    return f"{shape} {base_digest(run.source)}{quantized}{added}"


def _folder_digest(folder: Path) -> str:
    """Return a digest of the weights of an adapter folder."""
    sha = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        with open_stream(inside(folder, file.name)) as stream:
            while block := stream.read(1 << 20):
                sha.update(block)
    return sha.hexdigest()


def _rows_done(rows: float) -> str:
    return f"{format_count(rows)} rows"
