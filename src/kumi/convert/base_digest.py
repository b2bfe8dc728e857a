"""Fingerprint a base model's folder without reading all of it, so that adapters can tell whether it has changed."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from kumi.files.untrusted import INDEX, inside, open_regular, read_bytes

# Blocks sampled from each weight file, spread evenly from its first to its last byte, and bytes per block.
_BLOCKS, _BYTES = 16, 4096


def base_digest(folder: Path) -> str:
    """Return a SHA-256 over config.json and a sample of every .safetensors file in `folder`.

    Of each file: name, size, header, and `_BLOCKS` blocks spread evenly over it.
    """
    sha = hashlib.sha256(read_bytes(folder, "config.json"))
    for file in sorted(folder.glob("*.safetensors")):
        handle = open_regular(inside(folder, file.name))
        size = os.fstat(handle).st_size
        sha.update(f"{file.name}/{size}".encode())
        try:
            header = 8 + min(size, int.from_bytes(os.pread(handle, 8, 0), "little"), INDEX.size)
            sha.update(os.pread(handle, header, 0))
            for block in range(_BLOCKS):
                sha.update(os.pread(handle, _BYTES, max(0, size - _BYTES) * block // (_BLOCKS - 1)))
        finally:
            os.close(handle)
    return sha.hexdigest()
