"""A digest of a few blocks of a file, which tells files of the same size and time apart at the cost of three reads."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

from kumi.files.untrusted import open_stream

_BLOCK = 16 << 10


def sampled_digest(paths: Iterable[Path]) -> str:
    """Return a digest of the first, middle and last 16 KiB of each file, or all of a small one; "" if unreadable."""
    digest = hashlib.blake2b(digest_size=8)
    try:
        for path in paths:
            with open_stream(path, follow=True, buffering=_BLOCK) as stream:
                size = os.fstat(stream.fileno()).st_size
                starts = (0, (size - _BLOCK) // 2, size - _BLOCK) if size > 3 * _BLOCK else range(0, size, _BLOCK)
                for start in starts:
                    digest.update(os.pread(stream.fileno(), _BLOCK, start))
    except OSError:
        return ""  # the later reading of the file reports why
    return digest.hexdigest()
