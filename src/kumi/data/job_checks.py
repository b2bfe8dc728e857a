"""Parts of a worker's job that documents and examples share: faults, the split, and checks of files and the parent."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from kumi.data.record_files import Fault
from kumi.errors import ConfigError, DataError

# Called with the bytes and the tokens of a job that are done so far.
Report = Callable[[int, int], None]
# Estimated ratio of text to compressed bytes, for the progress display only.
EXPANSION = 4


def in_validation(content: str | bytes, fraction: float) -> bool:
    """Return True if a document or row is held out; its hash decides, so identical ones are never parted."""
    raw = content.encode() if isinstance(content, str) else content
    return int.from_bytes(hashlib.blake2b(raw, digest_size=8, person=b"kumi-split").digest(), "little") < (
        fraction * 2**64
    )


def record_fault(job: dict[str, Any], counts: Counter[str], faults: TextIO, segment: int, fault: Fault) -> None:
    """Count the fault and write it to faults.jsonl. Raise DataError with on_error="fail"."""
    if job["on_error"] == "fail":
        raise DataError(json.dumps([segment, fault.file, fault.line, fault.reason]))
    counts[f"fault:{fault.kind}"] += 1
    faults.write(json.dumps([segment, fault.file, fault.line, fault.kind, fault.reason]) + "\n")


def check_unchanged(file: dict[str, Any]) -> None:
    """Raise ConfigError unless `file` has its planned size and time; indexed data is checked when it is opened."""
    if file["format"] == "indexed":
        return
    path = Path(file["path"])
    now = path.stat() if path.exists() else None
    if now is None or (now.st_size, now.st_mtime_ns) != (file["size"], file["mtime"]):
        raise ConfigError(
            f"{file['path']}: was changed or removed while it was being read; run again when it is complete"
        )


def check_parent(parent: int) -> None:
    """Exit if the parent was killed, before this worker writes to a folder that a new run may use."""
    if os.getppid() != parent:
        raise SystemExit(1)
