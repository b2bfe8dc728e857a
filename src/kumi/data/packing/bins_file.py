"""The plan of bins, which says which units each row has, as a file in the store's folder.

It is made once, before any rank starts. The name has a digest of everything that the plan depends on, so that a plan of
other data or options is never read. The file is a list of little-endian int32: `_MAGIC`, CRC-32 of the rest, the
numbers of units of the source, of rows, of units that are too long and of units that are empty, then `Bins.bounds` and
`Bins.units`."""

from __future__ import annotations

import hashlib
import os
import zlib
from pathlib import Path

import numpy as np

from kumi.data.binfile import Array
from kumi.data.packing.best_fit import VERSION, Bins, pack
from kumi.data.packing.unit_positions import Units, positions_of
from kumi.errors import ConfigError, RefusedError
from kumi.files.output import open_new
from kumi.files.untrusted import explain, open_stream
from kumi.objectives import LM_ROWS, RowForm

_MAGIC = 0x534E4942  # "BINS"
_HEADER = 6  # int32 before `Bins.bounds`


def pack_units(units: Units, content: str, seq_len: int, seed: int, form: RowForm = LM_ROWS) -> Bins:
    """Return the bins of `units` in rows of `seq_len`; pack them unless their plan is stored, and store it.

    `content`: digest of the units. Raise ConfigError when no unit fits.
    """
    try:
        return open_bins(units, content, seq_len, seed, form)
    except RefusedError:
        pass  # missing, or damaged: the same plan is made again
    bins = pack(positions_of(units, form), seq_len, seed)
    if not bins.rows:
        raise ConfigError(
            f"{units.prefix}: none of the {len(units.columns)} examples fits a row of {seq_len} tokens "
            f"({bins.too_long} are longer); raise batch.seq_len, or leave the source out"
        )
    _write(_path(units, content, seq_len, seed, form), bins, len(units.columns))
    return bins


def open_bins(units: Units, content: str, seq_len: int, seed: int, form: RowForm = LM_ROWS) -> Bins:
    """Return the stored bins of `units`, memory-mapped. Raise RefusedError for a missing or damaged plan."""
    path = _path(units, content, seq_len, seed, form)
    remedy = "run kumi train again, which packs the examples before it starts"
    try:
        with open_stream(path) as stream:
            size = os.fstat(stream.fileno()).st_size
            if size % 4 or size < 4 * _HEADER:
                raise ValueError(f"it has {size} bytes")
            values: Array = np.memmap(stream, "<i4", "r")
        return _checked(values, len(units.columns))
    except FileNotFoundError:
        raise RefusedError(f"{path}: no such plan of packed rows; {remedy}") from None
    except (OSError, ValueError) as error:
        raise RefusedError(f"{path}: is no plan of packed rows ({explain(error)}); remove it, and {remedy}") from None


def _path(units: Units, content: str, seq_len: int, seed: int, form: RowForm) -> Path:
    # Of the form, only these two fields decide the positions of units.
    options = f"{' scored' if form.scored else ''}{' mismatched' if form.mismatched else ''}"
    inputs = f"{VERSION} {content} {units.kind} {seq_len} {seed}{options}"
    return Path(f"{units.prefix}.bins.{hashlib.blake2b(inputs.encode(), digest_size=8).hexdigest()}.i4")


def _write(path: Path, bins: Bins, count: int) -> None:
    """Write `bins` of `count` units atomically; several processes may do so at the same time."""
    counts = np.array([count, bins.rows, bins.too_long, bins.empty], "<i4")
    parts: list[Array] = [counts, bins.bounds.astype("<i4"), bins.units.astype("<i4")]
    crc = 0
    for part in parts:
        crc = zlib.crc32(part.data, crc)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    with open_new(partial, "wb") as out:
        out.write(np.array([_MAGIC, crc], "<u4").data)
        for part in parts:
            out.write(part.data)
        out.flush()
        os.fsync(out.fileno())
    os.replace(partial, path)


def _checked(values: Array, expected: int) -> Bins:
    """Return the bins in the content `values` of a file. Raise ValueError unless they are bins of `expected` units."""
    magic, crc = (int(value) for value in values[:2].view("<u4"))
    count, rows, too_long, empty = (int(value) for value in values[2:_HEADER])
    if magic != _MAGIC or zlib.crc32(values[2:].data) != crc:
        raise ValueError("its content does not match its checksum")
    begin = _HEADER + rows + 1
    bounds, units = values[_HEADER:begin], values[begin:]
    if count != expected or rows < 1 or len(bounds) != rows + 1 or len(units) != count - too_long - empty:
        raise ValueError(f"it lists {count} units in {rows} rows for {expected} units")
    if bounds[0] != 0 or bounds[-1] != len(units) or (np.diff(bounds) < 1).any():
        raise ValueError("its rows do not follow one another")
    if units.min() < 0 or units.max() >= count:
        raise ValueError("it lists a unit that does not exist")
    return Bins(units, bounds, too_long, empty)
