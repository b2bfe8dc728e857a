"""The stop file of a run: whoever writes `stop` into the run folder asks the run to save and end with exit code 75.

The file reaches a run on any machine that sees the folder, and at any time, also before Python runs. Batch scripts and
`kumi stop` write it. The process that leads the run turns it into the signal SIGUSR1.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kumi.files.output import open_new
from kumi.launch.signals import EXIT_CODES

STOP_FILE = "stop"
_POLL_SECONDS = 1.0


@contextmanager
def obey_stop_file(out: Path, age: float) -> Iterator[None]:
    """Within the block, send SIGUSR1 to the main thread of this process once the folder `out` has a stop file.

    A stop file that is older than `age` seconds, by the clock of the file system, was meant for an earlier start, and
    is removed. The file is removed at the end of the block, too.
    """
    file, ended = out / STOP_FILE, threading.Event()
    with suppress(FileNotFoundError):
        if file.lstat().st_mtime < _file_system_time(out) - age:
            file.unlink()
    thread = threading.Thread(target=_poll, args=(file, ended), name="kumi-stop", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        with suppress(OSError):
            file.unlink()


def _poll(file: Path, ended: threading.Event) -> None:
    """Send SIGUSR1 to the main thread once `file` exists, unless the event `ended` is set before."""
    signal.pthread_sigmask(signal.SIG_BLOCK, EXIT_CODES)  # only the main thread receives signals
    while not ended.is_set():
        # Before training begins, a program that calls kumi may have no handler: the signal would kill the program.
        if file.exists() and signal.getsignal(signal.SIGUSR1) is not signal.SIG_DFL:
            with suppress(OSError):
                print(f"stop       asked for by {file}", file=sys.stderr, flush=True)
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
            return
        ended.wait(_POLL_SECONDS)


def _file_system_time(folder: Path) -> float:
    """Return the time by the clock of the file system of `folder`, which may be another machine's."""
    mark = folder / f"{STOP_FILE}.clock"
    try:
        with open_new(mark) as handle:
            return os.fstat(handle.fileno()).st_mtime
    except OSError:
        return time.time()
    finally:
        with suppress(OSError):
            mark.unlink()


def process_age() -> float:
    """Return the seconds since this process started; outside Linux, the seconds of CPU time that it has used."""
    try:
        started = float(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return float(Path("/proc/uptime").read_text().split()[0]) - started / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):  # not Linux
        return time.process_time()
