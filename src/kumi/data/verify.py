"""The token files of a store compared with what its meta.json says of them."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from kumi.data import binfile, store
from kumi.data.binfile import Array, bin_path, idx_path
from kumi.data.checksums import Guard, block_bytes, checksums_of, from_plain, remedy
from kumi.data.work import SIDES
from kumi.errors import RefusedError

# Tokens of no more bytes are all read when a run starts, in seconds; of more, each block when it is first used.
AT_START = 8 << 30


class ContentDigest:
    """BLAKE2b digests of ids and of lengths of documents, apart, so that it does not matter how they are cut."""

    def __init__(self) -> None:
        self._parts = hashlib.blake2b(digest_size=16), hashlib.blake2b(digest_size=16)

    def update(self, ids: Array, lengths: Array) -> None:
        """Add documents with these `ids`, one after the other, and `lengths` (int32)."""
        for part, array in zip(self._parts, (ids, lengths), strict=True):
            part.update(np.ascontiguousarray(array).data)

    def hexdigest(self) -> str:
        """Return both, 32 hexadecimal digits each."""
        return "".join(part.hexdigest() for part in self._parts)


def add_checksums(folder: Path, entries: list[dict[str, Any]]) -> bool:
    """Add to `entries`, the sources in the meta.json of `folder`, the checksums they lack; return True if any did."""
    pairs = _pairs(folder, entries)
    block = block_bytes(sum(path.stat().st_size for _, _, prefix in pairs for path in _files(prefix)))
    missing = [(entry, f"{side}_checksums", prefix) for entry, side, prefix in pairs if not _has_checksums(entry, side)]
    for entry, key, prefix in missing:
        entry[key] = {path.suffix[1:]: checksums_of(path, block).plain() for path in _files(prefix)}
    return bool(missing)


def _pairs(folder: Path, entries: list[dict[str, Any]]) -> list[tuple[dict[str, Any], str, Path]]:
    """Return the entry, side and prefix of each pair of token files of `entries`."""
    return [(entry, side, folder / entry[side]) for entry in entries for side in SIDES if entry[side]]


def _files(prefix: Path) -> tuple[Path, Path]:
    return bin_path(prefix), idx_path(prefix)


def _has_checksums(entry: dict[str, Any], side: str) -> bool:
    return entry.get(f"{side}_checksums") is not None


def verify(folder: Path) -> bool:
    """Verify the token files of the store in `folder`; return True where its meta.json got checksums.

    Indexes are verified in full, and so are tokens where all together have at most `AT_START` bytes. A store of an
    earlier version has digests only: its files are read once, and their checksums added. Raise RefusedError naming the
    file and the place of what differs, DataError for an id that is not in the vocabulary.
    """
    store.open_store(folder)  # whose refusals say of a file whose size is wrong that it is
    meta = store.read_meta(folder)
    assert meta is not None, f"{folder} has been prepared"
    pairs = _pairs(folder, meta["sources"])
    at_start = sum(bin_path(prefix).stat().st_size for _, _, prefix in pairs) <= AT_START
    for entry, side, prefix in pairs:
        if not _has_checksums(entry, side):
            _verify_digest(prefix, entry[f"{side}_digest"], meta["vocab_size"])
            continue
        for path in _files(prefix) if at_start else (idx_path(prefix),):
            Guard(path, from_plain(entry[f"{side}_checksums"].get(path.suffix[1:]), path)).check()
    added = add_checksums(folder, meta["sources"])
    if added:
        store.write_json(folder / store.META, meta)
    return added


def _verify_digest(prefix: Path, expected: str, vocab_size: int) -> None:
    """Raise RefusedError unless the pair `prefix`, which kumi wrote, holds the documents of the digest `expected`."""
    file = binfile.open_file(prefix, vocab_size=vocab_size)
    file.check_lists()
    digest = ContentDigest()
    for ids, lengths in file.blocks():
        digest.update(ids, lengths)
    if digest.hexdigest() != expected:
        raise RefusedError(
            f"{bin_path(prefix)}: its documents have the digest {digest.hexdigest()[:12]}, {expected[:12]} was "
            f"prepared: it or its index is damaged, or was changed; {remedy(prefix)}"
        )
