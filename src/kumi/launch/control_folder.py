"""The control folder: ranks report to their launcher that they started, returned or failed.

    .launch-HOST-XXXX/lock      locked by the launcher and its ranks; a free lock means that all of them are dead
                 go             written by the launcher once all ranks have started
                 1.pid          process id of rank 1
                 1.report       disk space for the error of rank 1; it becomes 1.failure
                 1.returned     exit code of rank 1
                 1.failure      error of rank 1, as JSON

The control folder lies beside the ranks' logs. If a launcher is killed, its control folder stays there, and the next
launcher on the same host removes it. On some network file systems a lock holds on one host only, so that other hosts
could not tell a dead launcher from a living one.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

_PREFIX, _DRAFT = ".launch-", ".new"
# Until its lock is taken, a control folder is a draft: its name ends with _DRAFT. Another launcher may still be making
# a draft that is younger than this.
_DRAFT_SECONDS = 600.0
# Every rank allocates this many bytes on disk at its start, so that it can report a failure on a full disk.
_REPORT_BYTES = 64 * 1024


@dataclass(frozen=True)
class Failure:
    """The error that ended a rank."""

    rank: int
    at: float  # monotonic seconds
    kinds: list[str]  # class names of the error, in method resolution order
    message: str
    trace: str
    secondary: bool  # possibly a consequence of another rank's failure


def log_path(log_dir: Path, rank: int) -> Path:
    """Return the log file of `rank`: output and tracebacks; only tracebacks for rank 0, which prints to the
    terminal."""
    return log_dir / f"rank_{rank:05d}.log"


@contextmanager
def control_folder(log_dir: Path) -> Iterator[Path]:
    """Create a control folder in `log_dir` and remove it at the end of the block.

    Remove the control folders of dead launchers first.
    """
    prefix = f"{_PREFIX}{re.sub('[^A-Za-z0-9.]', '_', socket.gethostname())[:64]}-"
    for folder in log_dir.glob(f"{prefix}*"):
        _remove_stale(folder)
    draft = Path(tempfile.mkdtemp(prefix=prefix, suffix=_DRAFT, dir=log_dir))
    with open(draft / "lock", "w") as lock:  # ranks inherit the lock, so it is free only when the last rank is dead
        with suppress(OSError):  # a file system without locks; its control folders are never removed as stale
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        folder = draft.rename(draft.with_name(draft.name.removesuffix(_DRAFT)))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _remove_stale(folder: Path) -> None:
    """Remove the control folder `folder` if its launcher and all of its ranks are dead."""
    try:
        if folder.name.endswith(_DRAFT) and time.time() - folder.stat().st_mtime < _DRAFT_SECONDS:
            return
        with open(folder / "lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
    except FileNotFoundError:  # the launcher was killed before it made the lock
        with suppress(OSError):
            folder.rmdir()
    except OSError:
        return


def announce_rank(control: Path, rank: int) -> None:
    """Report the process id of `rank` to the launcher, and allocate disk space for a failure report."""
    with suppress(OSError), open(_report_path(control, rank), "wb") as file:
        os.posix_fallocate(file.fileno(), 0, _REPORT_BYTES)
    _publish(control / f"{rank}.pid", str(os.getpid()))


def read_pids(control: Path) -> dict[int, int]:
    """Return the process ids of the ranks that have started, keyed by rank."""
    return {int(path.stem): int(path.read_text()) for path in control.glob("*.pid")}


def release_ranks(control: Path) -> None:
    """Let all ranks begin. They wait for this call after their start."""
    (control / "go").touch()


def ranks_released(control: Path) -> bool:
    """Return True once the launcher has released the ranks."""
    return (control / "go").exists()


def report_return(control: Path, rank: int, code: int) -> None:
    """Report to the launcher that the function of `rank` returned the exit `code`."""
    _publish(control / f"{rank}.returned", str(code))


def has_returned(control: Path, rank: int) -> bool:
    """Return True if the function of `rank` has returned."""
    return (control / f"{rank}.returned").exists()


def report_failure(control: Path, failure: Failure) -> None:
    """Report `failure` to the launcher, in the disk space that the rank allocated at its start."""
    text = _encode(failure)
    report = _report_path(control, failure.rank)
    with open(report, "r+b" if report.exists() else "wb") as file:
        file.write(text)
        file.truncate()
    report.rename(control / f"{failure.rank}.failure")


def read_failures(control: Path) -> list[Failure]:
    """Return the failures that ranks have reported in `control`."""
    return [Failure(**json.loads(path.read_text())) for path in sorted(control.glob("*.failure"))]


def _report_path(control: Path, rank: int) -> Path:
    return control / f"{rank}.report"


def _encode(failure: Failure) -> bytes:
    """Encode `failure` as JSON of at most `_REPORT_BYTES`: cut the end of the message and the start of the trace."""
    keep = _REPORT_BYTES
    while len(text := json.dumps(asdict(failure)).encode()) > _REPORT_BYTES:
        keep //= 2
        failure = Failure(
            failure.rank, failure.at, failure.kinds, failure.message[:keep], failure.trace[-keep:], failure.secondary
        )
    return text


def _publish(path: Path, text: str) -> None:
    """Write `path` atomically: the launcher sees it complete or not at all."""
    draft = path.with_suffix(path.suffix + ".part")
    draft.write_text(text)
    draft.rename(path)
