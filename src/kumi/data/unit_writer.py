"""Write units of examples in the layout that `kumi.data.unit_files` reads."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from kumi.data import binfile
from kumi.data.binfile import Append, Array
from kumi.data.unit_files import COLUMNS_SUFFIX, EXTRA_SUFFIX, TOKEN_SIDECARS, UNIT_COLUMNS, UnitTokens, sidecar_path
from kumi.data.verify_store import ContentDigest
from kumi.files.output import open_new
from kumi.files.untrusted import open_stream

_BUFFER = 1 << 18


class UnitWriter:
    """Appends units to the files of a source's training or validation data, and computes a digest of them.

    The file of weights is created at the first weight other than 1; tokens before it get the weight 1.
    """

    def __init__(self, prefix: Path, append: Append, extra: Append | None, stack: ExitStack) -> None:
        self._prefix, self._append, self._extra, self._stack = prefix, append, extra, stack
        self._streams = {name: self._open(name) for name in (*TOKEN_SIDECARS, COLUMNS_SUFFIX) if name != "weight"}
        self._content, self._extra_content = ContentDigest(), ContentDigest()
        self._digests = {name: hashlib.blake2b(digest_size=16) for name in (*self._streams, "weight")}
        self.documents = self.tokens = self.units = 0

    def append(self, tokens: UnitTokens, columns: Array, extras: Sequence[bytes] = ()) -> None:
        """Add units by their tokens and records.

        columns: records of `UNIT_COLUMNS`; their first_document is replaced. extras: for prompts, the JSON object of
        each unit.
        """
        weights = tokens.weights
        if weights is not None and "weight" not in self._streams and bool((weights != 1).any()):
            self._streams["weight"] = self._open("weight")
            for start in range(0, self.tokens, _BUFFER):
                self._write("weight", np.ones(min(_BUFFER, self.tokens - start), np.float32))
        if "weight" in self._streams:
            self._write("weight", np.ones(len(tokens.ids), np.float32) if weights is None else weights)
        columns = columns.copy()
        columns["first_document"] = self.documents + np.cumsum(columns["documents"]) - columns["documents"]
        self._append(tokens.ids, tokens.lengths)
        self._content.update(tokens.ids, np.asarray(tokens.lengths, np.int32))
        self._write("mask", tokens.mask)
        self._write("turn", tokens.turns)
        self._write(COLUMNS_SUFFIX, columns)
        if self._extra is not None:
            assert len(extras) == len(columns)
            raw = np.frombuffer(b"".join(extras), np.uint8)
            lengths = np.array([len(extra) for extra in extras], np.int32)
            self._extra(raw, lengths)
            self._extra_content.update(raw, lengths)
        self.documents += len(tokens.lengths)
        self.tokens += len(tokens.ids)
        self.units += len(columns)

    @property
    def weighted(self) -> bool:
        """Return True if a weight other than 1 was appended."""
        return "weight" in self._streams

    def hexdigest(self) -> str:
        """Return the digests of ids, of lengths, and of sidecars with columns: 32 hexadecimal digits each."""
        digests = [self._digests[name].hexdigest() for name in sorted(self._digests)]
        parts = "".join([*digests, self._extra_content.hexdigest()])
        return self._content.hexdigest() + hashlib.blake2b(parts.encode(), digest_size=16).hexdigest()

    def _open(self, suffix: str) -> BinaryIO:
        stream: BinaryIO = self._stack.enter_context(open_new(_partial(self._prefix, suffix), "wb", _BUFFER))
        return stream

    def _write(self, suffix: str, values: Array) -> None:
        """Append `values` to the unfinished sidecar `suffix`, and to its digest."""
        dtype = UNIT_COLUMNS if suffix == COLUMNS_SUFFIX else TOKEN_SIDECARS[suffix]
        raw = np.ascontiguousarray(values, dtype).view(np.uint8).data
        self._streams[suffix].write(raw)
        self._digests[suffix].update(raw)

    def finish(self) -> None:
        """Write all buffered bytes to the disk and give the sidecars their final names."""
        for suffix, stream in self._streams.items():
            stream.flush()
            os.fsync(stream.fileno())
            target = sidecar_path(self._prefix, suffix)
            if suffix == COLUMNS_SUFFIX:
                _write_array(target, _partial(self._prefix, suffix), self.units)
            else:
                os.replace(_partial(self._prefix, suffix), target)


@contextmanager
def open_unit_writer(prefix: Path | str, dtype: np.dtype[Any], kind: str) -> Iterator[UnitWriter]:
    """Yield a writer of the files `prefix`, for units made from rows of `kind`, with token ids of `dtype`.

    The files get their final names at the end of the block, the token file last. An exception in the block leaves only
    `.partial` files. Memory is constant in the number of units.
    """
    prefix = Path(prefix)
    sidecar_path(prefix, "weight").unlink(missing_ok=True)  # left from an earlier preparation
    with binfile.open_writer(prefix, dtype) as append, ExitStack() as stack:
        extra = None
        if kind == "prompt":
            extra = stack.enter_context(binfile.open_writer(sidecar_path(prefix, EXTRA_SUFFIX), np.dtype(np.uint8)))
        writer = UnitWriter(prefix, append, extra, stack)
        yield writer
        writer.finish()


def _partial(prefix: Path, suffix: str) -> Path:
    return Path(f"{prefix}.{suffix}.partial")


def _write_array(path: Path, records: Path, count: int) -> None:
    """Write the array file `path` of `count` records, which the file `records` has as raw bytes; remove `records`."""
    with_header = path.with_name(path.name + ".header.partial")
    with open_new(with_header, "wb", _BUFFER) as out, open_stream(records) as source:
        header = {"descr": np.lib.format.dtype_to_descr(UNIT_COLUMNS), "fortran_order": False, "shape": (count,)}
        np.lib.format.write_array_header_1_0(out, header)
        shutil.copyfileobj(source, out, _BUFFER)
        out.flush()
        os.fsync(out.fileno())
    os.replace(with_header, path)
    records.unlink()
