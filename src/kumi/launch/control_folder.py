"""The folder in which ranks tell their launcher that they have started, returned or failed, and why.

    .launch-XXXX/lock           held by the launcher and its ranks: a folder whose lock is free belongs to dead ones
                 go             from the launcher: all ranks are there
                 1.pid          of rank 1: its process id
                 1.returned     its exit code
                 1.failure      why it failed

It lies beside the ranks' logs, so that a launcher that is killed leaves nothing elsewhere; the next one removes it.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

_PREFIX = ".launch-"
# Room on the disk that every rank takes at its start for the report of its failure: the failure may be a full disk.
_REPORT_BYTES = 64 * 1024


@dataclass(frozen=True)
class Failure:
    """Why a rank failed: when (monotonic seconds), the names of the error's classes, its text and traceback.

    `echo`: it may be the consequence of another rank's failure.
    """

    rank: int
    at: float
    kinds: list[str]
    message: str
    trace: str
    echo: bool


def log_path(log_dir: Path, rank: int) -> Path:
    """The log of `rank`: all it prints for ranks other than 0, tracebacks for rank 0, which prints to the terminal."""
    return log_dir / f"rank_{rank:05d}.log"


@contextmanager
def control_folder(log_dir: Path) -> Iterator[Path]:
    """A new control folder in `log_dir`, removed at the end. Those of dead launchers are removed first."""
    for folder in log_dir.glob(f"{_PREFIX}*"):
        _remove_stale(folder)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=log_dir))
    with open(folder / "lock", "w") as lock:  # ranks inherit it, so that the folder is held until the last one is dead
        with suppress(OSError):  # a file system without locks: nothing there is ever taken for stale
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _remove_stale(folder: Path) -> None:
    try:
        with open(folder / "lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
    except FileNotFoundError:  # its launcher was killed before it made the lock, or makes it right now
        with suppress(OSError):
            folder.rmdir()
    except OSError:
        return


def announce(control: Path, rank: int) -> None:
    """Tell the launcher the process id of `rank`, and take the room for its report."""
    with suppress(OSError), open(_report(control, rank), "wb") as file:
        os.posix_fallocate(file.fileno(), 0, _REPORT_BYTES)
    _publish(control / f"{rank}.pid", str(os.getpid()))


def read_pids(control: Path) -> dict[int, int]:
    """Rank to process id of the ranks that have started."""
    return {int(path.stem): int(path.read_text()) for path in control.glob("*.pid")}


def let_all_go(control: Path) -> None:
    """Let the ranks begin, which wait for this until all are there."""
    (control / "go").touch()


def may_go(control: Path) -> bool:
    """Whether all ranks are there."""
    return (control / "go").exists()


def report_return(control: Path, rank: int, code: int) -> None:
    """Tell the launcher that the function of `rank` has returned `code`."""
    _publish(control / f"{rank}.returned", str(code))


def has_returned(control: Path, rank: int) -> bool:
    """Whether the function of `rank` has returned."""
    return (control / f"{rank}.returned").exists()


def report_failure(control: Path, failure: Failure) -> None:
    """Tell the launcher why a rank failed, within the room that it took at its start."""
    text = _fitting(failure)
    report = _report(control, failure.rank)
    with open(report, "r+b" if report.exists() else "wb") as file:
        file.write(text)
        file.truncate()
    report.rename(control / f"{failure.rank}.failure")


def read_failures(control: Path) -> list[Failure]:
    """The failures that ranks have reported in `control`."""
    return [Failure(**json.loads(path.read_text())) for path in sorted(control.glob("*.failure"))]


def _report(control: Path, rank: int) -> Path:
    return control / f"{rank}.report"


def _fitting(failure: Failure) -> bytes:
    """`failure` as JSON of at most `_REPORT_BYTES`, with the ends of its texts where they are long."""
    keep = _REPORT_BYTES
    while len(text := json.dumps(asdict(failure)).encode()) > _REPORT_BYTES:
        keep //= 2
        failure = Failure(
            failure.rank, failure.at, failure.kinds, failure.message[:keep], failure.trace[-keep:], failure.echo
        )
    return text


def _publish(path: Path, text: str) -> None:
    draft = path.with_suffix(path.suffix + ".part")
    draft.write_text(text)
    draft.rename(path)
