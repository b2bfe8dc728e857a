"""The reference model's log-probs of one side of a source (training or validation), as a file beside its tokens.

The name of the file has a digest of everything that the log-probs depend on, so that those of another model or of other
data are never read. Content, little-endian: `_MAGIC` and the CRC-32 of the rest as uint32; rows done, rows, sequences
and units as int64; the fingerprint of the weights as float64 (2,); then the arrays of `ReferenceSums`."""

from __future__ import annotations

import os
import zlib
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from kumi.data.binfile import Array
from kumi.errors import RefusedError
from kumi.files.output import open_new
from kumi.files.untrusted import explain, open_stream

_MAGIC = 0x5346_4552  # "REFS"
_HEAD = np.dtype([("magic", "<u4"), ("crc", "<u4"), ("done", "<i8"), ("rows", "<i8"), ("sizes", "<i8", 2)])


@dataclass(eq=False)
class ReferenceSums:
    """What the reference model computed for the sequences of one side of a source.

    sums: sum of the log-probs of the trained tokens of each sequence, float64 (sequences,); nan for a sequence that no
        row has.
    trained: number of trained tokens of each sequence, float64.
    tokens: CRC-32 of the tokens of each sequence, float64.
    mismatched: sum of the log-probs of each example's mismatched sequence (KTO: its prompt with the completion of
        another example), float64 (examples,); nan where not computed.
    fingerprint: of the weights, see `kumi.train.reference_sums.weights_fingerprint`.
    done: number of rows that are computed so far, in order.
    rows: number of all rows.
    """

    sums: Array
    trained: Array
    tokens: Array
    mismatched: Array
    fingerprint: Array
    done: int
    rows: int

    @property
    def complete(self) -> bool:
        return self.done == self.rows


def empty_sums(sequences: int, units: int, rows: int) -> ReferenceSums:
    """Return the `ReferenceSums` of `rows` rows, with none of them computed yet."""
    sums, trained, tokens, mismatched, fingerprint = (
        np.full(size, np.nan) for size in (sequences, sequences, sequences, units, 2)
    )
    return ReferenceSums(sums, trained, tokens, mismatched, fingerprint, 0, rows)


def reference_path(prefix: Path, digest: str) -> Path:
    """Return the path of the log-probs of the token files `prefix`, by a reference whose inputs have `digest`."""
    return Path(f"{prefix}.reference.{digest}.f8")


def write_sums(path: Path, sums: ReferenceSums) -> None:
    """Write `sums` atomically."""
    head = np.zeros(1, _HEAD)
    head["magic"], head["done"], head["rows"] = _MAGIC, sums.done, sums.rows
    head["sizes"] = len(sums.sums), len(sums.mismatched)
    parts = [np.ascontiguousarray(part, "<f8") for part in _arrays(sums)]
    head["crc"] = _crc(head, parts)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    with open_new(partial, "wb") as out:
        for part in (head, *parts):
            out.write(part.data)
        out.flush()
        os.fsync(out.fileno())
    os.replace(partial, path)


def read_sums(path: Path, sequences: int, units: int) -> ReferenceSums | None:
    """Return the stored sums, memory-mapped; None if the file does not exist.

    Raise RefusedError for a damaged file, or one with other numbers of sequences and units.
    """
    try:
        with open_stream(path) as stream:
            size = os.fstat(stream.fileno()).st_size
            if size != _HEAD.itemsize + 8 * (2 + 3 * sequences + units):
                raise ValueError(f"its {size} bytes do not fit {sequences} sequences and {units} units")
            head: Array = np.memmap(stream, _HEAD, "r", shape=1)
            values: Array = np.memmap(stream, "<f8", "r", _HEAD.itemsize)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise _damaged(path, explain(error)) from None
    bounds = np.cumsum([0, 2, sequences, sequences, sequences, units])
    fingerprint, *arrays = (values[begin:end] for begin, end in pairwise(bounds))
    if int(head["magic"][0]) != _MAGIC or int(head["crc"][0]) != _crc(head.copy(), [values]):
        raise _damaged(path, "its content does not match its checksum")
    done, rows = int(head["done"][0]), int(head["rows"][0])
    sums, trained, tokens, mismatched = arrays
    return ReferenceSums(sums, trained, tokens, mismatched, fingerprint, done, rows)


def _arrays(sums: ReferenceSums) -> tuple[Array, ...]:
    return sums.fingerprint, sums.sums, sums.trained, sums.tokens, sums.mismatched


def _crc(head: Array, parts: list[Any]) -> int:
    """Return the CRC-32 of the file without its own field."""
    crc = zlib.crc32(head.tobytes()[8:])
    for part in parts:
        crc = zlib.crc32(part.data, crc)
    return crc


def _damaged(path: Path, reason: str) -> RefusedError:
    """Return the error for a file that does not have the log-probs."""
    return RefusedError(
        f"{path}: holds no log-probs of the reference for this data ({reason}); remove it, and run kumi train again, "
        "which computes them"
    )
