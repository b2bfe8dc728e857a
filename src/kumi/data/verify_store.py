"""Verify the token files of a store against the checksums and digests in its meta.json."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from kumi.data import binfile, store
from kumi.data.binfile import Array, bin_path, idx_path
from kumi.data.checksums import Guard, block_bytes, checksums_of, from_plain, remedy
from kumi.data.shards import SIDES
from kumi.errors import RefusedError

# Bytes of tokens. Smaller stores are verified in full at the start of a run, in seconds; in larger ones each block is
# verified before its first use.
AT_START = 8 << 30


class ContentDigest:
    """BLAKE2b digests of ids and of document lengths, which do not depend on how updates are batched."""

    def __init__(self) -> None:
        self._digests = hashlib.blake2b(digest_size=16), hashlib.blake2b(digest_size=16)

    def update(self, ids: Array, lengths: Array) -> None:
        """Add documents: their concatenated `ids`, and their `lengths` (int32)."""
        for digest, array in zip(self._digests, (ids, lengths), strict=True):
            digest.update(np.ascontiguousarray(array).data)

    def hexdigest(self) -> str:
        """Return both digests as 64 hexadecimal digits, ids first."""
        return "".join(digest.hexdigest() for digest in self._digests)


def add_checksums(folder: Path, entries: list[dict[str, Any]]) -> bool:
    """Add missing checksums to `entries`, the sources in the meta.json of `folder`; return True if any were missing."""
    pairs = _pairs(folder, entries)
    block = block_bytes(sum(path.stat().st_size for _, _, prefix in pairs for path in _files(prefix)))
    missing = [(entry, f"{side}_checksums", prefix) for entry, side, prefix in pairs if not _has_checksums(entry, side)]
    for entry, key, prefix in missing:
        entry[key] = {path.suffix[1:]: checksums_of(path, block).plain() for path in _files(prefix)}
    return bool(missing)


def _pairs(folder: Path, entries: list[dict[str, Any]]) -> list[tuple[dict[str, Any], str, Path]]:
    """Return (entry, side, prefix) of each .bin/.idx pair of `entries`."""
    return [(entry, side, folder / entry[side]) for entry in entries for side in SIDES if entry[side]]


def _files(prefix: Path) -> tuple[Path, Path]:
    return bin_path(prefix), idx_path(prefix)


def _has_checksums(entry: dict[str, Any], side: str) -> bool:
    return entry.get(f"{side}_checksums") is not None


def verify(folder: Path) -> bool:
    """Verify the token files of the store in `folder`; return True if checksums were added to its meta.json.

    All indexes are verified, and all tokens if they have at most `AT_START` bytes in total. A store of an earlier
    version has only digests: its files are verified by the digests once, and checksums are added. Raise RefusedError
    with the file and position of a difference, DataError for an id outside the vocabulary.
    """
    store.open_store(folder)  # refuses files of the wrong size with a clearer message than a checksum
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
    """Raise RefusedError unless the documents of the pair `prefix` have the digest `expected`."""
    file = binfile.open_file(prefix, vocab_size=vocab_size)
    file.check_lists()
    digest = ContentDigest()
    for ids, lengths in file.blocks():
        digest.update(ids, lengths)
    if digest.hexdigest() != expected:
        raise RefusedError(
            f"{bin_path(prefix)}: its documents have the digest {digest.hexdigest()[:12]}, but {expected[:12]} was "
            f"prepared: the file or its index is damaged or was changed; {remedy(prefix)}"
        )
