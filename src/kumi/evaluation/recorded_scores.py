"""Scores and replies in a file, so that an interrupted evaluation can go on later.

A line has the digest of a request, and its score or the token ids of its reply. A file belongs to one model, by the
content of its weights, so equal requests of different tasks share a line.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kumi.errors import ConfigError
from kumi.files.output import open_append
from kumi.files.untrusted import open_stream


class RecordedScores:
    """An open file of scores and replies. Raises ConfigError if another process has it open.

    values: digest of a request -> its score, [log_prob, greedy], or the token ids of its reply.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.values = path, _read(path)
        self._file = open_append(path)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise ConfigError(
                f"{path}: another evaluation writes to this file; wait for it, or name another folder with --out"
            ) from None

    def add(self, keys: Sequence[str], values: Sequence[Any]) -> None:
        """Append values of JSON types under their keys, in one write that is on the disk when this returns."""
        lines = [json.dumps([key, value]) for key, value in zip(keys, values, strict=True)]
        self._file.write("".join(f"{line}\n" for line in lines))
        self._file.flush()
        os.fsync(self._file.fileno())
        self.values |= zip(keys, values, strict=True)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _read(path: Path) -> dict[str, Any]:
    """Return the values in the file at `path`, by key, after cutting off a last line whose write was interrupted."""
    if not path.exists():
        return {}
    with open_stream(path) as file:
        raw = file.read()
    complete = raw[: raw.rfind(b"\n") + 1]
    if len(complete) < len(raw):
        os.truncate(path, len(complete))
    try:
        return {str(key): value for key, value in map(json.loads, complete.splitlines())}
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{path}: is damaged ({error}); delete it, and its scores are computed again") from None


def request_key(kind: str, *parts: Sequence[int] | str) -> str:
    """Return the digest of a request: its kind, and its lists of token ids and texts."""
    sha = hashlib.sha256(kind.encode())
    for part in parts:
        raw = part.encode() if isinstance(part, str) else array("q", part).tobytes()
        sha.update(len(raw).to_bytes(8, "little") + raw)
    return sha.hexdigest()[:32]
