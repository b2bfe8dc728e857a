"""Whether a folder still holds the model that adapters were trained beside, told without reading all of it."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from kumi.files.untrusted import INDEX, inside, open_regular, read_bytes

# Of each file of weights so many blocks of so many bytes are looked at, spread evenly, the first and the last included.
_BLOCKS, _BYTES = 16, 4096


def digest(folder: Path) -> str:
    """A SHA-256 over config.json and, of every .safetensors file in `folder`, its name, its size and some of it: its
    header and blocks spread over the rest."""
    found = hashlib.sha256(read_bytes(folder, "config.json"))
    for file in sorted(folder.glob("*.safetensors")):
        handle = open_regular(inside(folder, file.name))
        size = os.fstat(handle).st_size
        found.update(f"{file.name}/{size}".encode())
        try:
            header = 8 + min(size, int.from_bytes(os.pread(handle, 8, 0), "little"), INDEX.size)
            found.update(os.pread(handle, header, 0))
            for block in range(_BLOCKS):
                found.update(os.pread(handle, _BYTES, max(0, size - _BYTES) * block // (_BLOCKS - 1)))
        finally:
            os.close(handle)
    return found.hexdigest()
