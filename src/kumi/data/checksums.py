"""Checksums of the blocks of a token file, so that a read verifies only the blocks it touches.

CRC-32 detects damage by disks and copies; it is no defence against an attacker. zlib computes it at 0.25 s per
gigabyte. See docs/decisions/token-checksums.md.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kumi.errors import RefusedError
from kumi.files.untrusted import open_stream

# Smallest size of a block in bytes, and largest number of blocks in a store: blocks have 64 KiB in stores up to 64 GiB,
# 1 MiB in a store of a terabyte. All checksums of a store thus take at most 8 MB, far below the limit of meta.json.
SMALLEST, MOST = 1 << 16, 1 << 20


@dataclass(frozen=True)
class Checksums:
    """Checksums of a file.

    block: bytes of a block; the last block may be shorter.
    crc32: CRC-32 of each block, 8 hexadecimal digits each.
    """

    block: int
    crc32: str

    def plain(self) -> dict[str, Any]:
        """Return the checksums as JSON data for meta.json."""
        return {"block": self.block, "crc32": self.crc32}

    def numbers(self) -> npt.NDArray[np.uint32]:
        """Return the checksums as integers, (blocks,)."""
        return np.frombuffer(bytes.fromhex(self.crc32), ">u4")


def from_plain(data: Any, file: Path) -> Checksums:
    """Return the checksums of `file` from `data`, the result of `plain`. Raise RefusedError for anything else."""
    block, crc32 = (data.get("block"), data.get("crc32")) if isinstance(data, Mapping) else (None, None)
    try:
        if type(block) is int and block >= 1 and len(bytes.fromhex(crc32 if isinstance(crc32, str) else "?")) % 4 == 0:
            return Checksums(block, str(crc32))
    except ValueError:
        pass  # not hexadecimal: refused below, like a wrong number of digits
    raise RefusedError(f"{file}: meta.json has no readable checksums of this file; {remedy(file)}")


def remedy(file: Path) -> str:
    """Return the remedy for a damaged token file, as the end of a sentence."""
    return (
        f"restore a copy, or remove the folder {file.parent} and run the same command again to prepare the data again"
    )


def block_bytes(size: int) -> int:
    """Return the bytes of a block, a power of two, for a store whose files have `size` bytes in total."""
    block = SMALLEST
    while block * MOST < size:
        block *= 2
    return block


def checksums_of(file: Path, block: int) -> Checksums:
    """Compute the checksums of `file`, in blocks of `block` bytes."""
    mapped = _map_file(file)
    crcs = (zlib.crc32(mapped[start : start + block].data) for start in range(0, len(mapped), block))
    return Checksums(block, b"".join(crc.to_bytes(4, "big") for crc in crcs).hex())


def _map_file(file: Path) -> npt.NDArray[np.uint8]:
    with open_stream(file) as stream:
        size = os.fstat(stream.fileno()).st_size
        return np.memmap(stream, np.uint8, "r") if size else np.zeros(0, np.uint8)


class Guard:
    """Verifier of a token file: checks each block against its checksum once per process, before its first use.

    Raise RefusedError when the file has more or fewer blocks than `checksums`.
    """

    def __init__(self, file: Path, checksums: Checksums) -> None:
        self.file, self.checksums, self.block, self.bytes = file, checksums, checksums.block, _map_file(file)
        self._expected = checksums.numbers()
        self._verified = np.zeros(len(self._expected), bool)
        if len(self._expected) != -(-len(self.bytes) // self.block):
            raise RefusedError(
                f"{file}: has {len(self.bytes)} bytes, meta.json has checksums of {len(self._expected)} blocks of "
                f"{self.block} bytes: it is not the file that was prepared; {remedy(file)}"
            )

    def check(self, start: int = 0, stop: int | None = None) -> None:
        """Raise RefusedError unless the blocks of the bytes in [start, stop) match their checksums."""
        for number in range(start // self.block, -(-(len(self.bytes) if stop is None else stop) // self.block)):
            if not self._verified[number]:
                first = number * self.block
                if zlib.crc32(self.bytes[first : first + self.block].data) != self._expected[number]:
                    raise RefusedError(
                        f"{self.file}: the bytes from {first} to {min(first + self.block, len(self.bytes)) - 1} do not "
                        f"match their checksum in meta.json: the file is damaged, or was changed after it was "
                        f"prepared; {remedy(self.file)}"
                    )
                self._verified[number] = True
