"""Verify the token files of a store against the checksums and digests in its meta.json."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np

from kumi.data import binfile, store, store_meta
from kumi.data.binfile import Array, bin_path
from kumi.data.checksums import Guard, block_bytes, checksums_of, from_plain, remedy
from kumi.data.shards import SIDES
from kumi.data.unit_files import EXTRA_SUFFIX, TOKEN_SIDECARS, open_units, sidecar_path, suffixes
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
    pairs = _pairs(entries)
    block = block_bytes(sum(path.stat().st_size for entry, side in pairs for path in side_files(folder, entry, side)))
    missing = [(entry, side) for entry, side in pairs if not _has_checksums(entry, side)]
    for entry, side in missing:
        entry[f"{side}_checksums"] = {
            suffix: checksums_of(sidecar_path(folder / entry[side], suffix), block).plain()
            for suffix in _suffixes(entry, side)
        }
    return bool(missing)


def _pairs(entries: list[dict[str, Any]]) -> list[tuple[dict[str, Any], str]]:
    """Return (entry, side) of each side of `entries` that has files."""
    return [(entry, side) for entry in entries for side in SIDES if entry[side]]


def side_files(folder: Path, entry: dict[str, Any], side: str) -> list[Path]:
    """Return the files of one side of a source, by its entry in the meta.json of `folder`."""
    return [sidecar_path(folder / entry[side], suffix) for suffix in _suffixes(entry, side)] if entry[side] else []


def _suffixes(entry: dict[str, Any], side: str) -> list[str]:
    return suffixes(entry.get("kind", "text"), entry.get(f"{side}_weighted", False))


def _has_checksums(entry: dict[str, Any], side: str) -> bool:
    return entry.get(f"{side}_checksums") is not None


def verify(folder: Path) -> bool:
    """Verify the token files of the store in `folder`; return True if checksums were added to its meta.json.

    All indexes and records of units are verified, and all values of tokens if they have at most `AT_START` bytes in
    total. A store of an earlier version has only digests: its files are verified by the digests once, and checksums are
    added. Raise RefusedError with the file and position of a difference, DataError for an id outside the vocabulary.
    """
    store.open_store(folder)  # refuses files of the wrong size with a clearer message than a checksum
    meta = store_meta.read_meta(folder)
    assert meta is not None, f"{folder} has been prepared"
    pairs = _pairs(meta["sources"])
    value_suffixes = ("bin", f"{EXTRA_SUFFIX}.bin", *TOKEN_SIDECARS)
    files = {
        (id(entry), side): dict(zip(_suffixes(entry, side), side_files(folder, entry, side), strict=True))
        for entry, side in pairs
    }
    sizes = (p.stat().st_size for group in files.values() for s, p in group.items() if s in value_suffixes)
    at_start = sum(sizes) <= AT_START
    for entry, side in pairs:
        prefix = folder / entry[side]
        if not _has_checksums(entry, side):
            _verify_digest(prefix, entry, side, meta["vocab_size"])
            continue
        for suffix, path in files[id(entry), side].items():
            if at_start or suffix not in value_suffixes:
                Guard(path, from_plain(entry[f"{side}_checksums"].get(suffix), path)).check()
        if entry.get("kind", "text") != "text":
            open_units(prefix, entry["kind"]).check_lists()
    added = add_checksums(folder, meta["sources"])
    if added:
        store_meta.write_json(folder / store_meta.META, meta)
    return added


def _verify_digest(prefix: Path, entry: dict[str, Any], side: str, vocab_size: int) -> None:
    """Raise RefusedError unless the documents of the pair `prefix` have the digest of their entry in meta.json."""
    expected = entry[f"{side}_digest"]
    if entry.get("kind", "text") != "text":
        raise RefusedError(f"{prefix}: meta.json has no checksums of these units; {remedy(prefix)}")
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
