"""The lock of a run folder: one process at a time leads the run, on all machines that share the folder.

`flock` keeps other processes of this machine out. On some network file systems it holds on one machine only, and other
file systems have no locks. The lock file therefore names its owner, with a beat: a number that the owner counts up
every two seconds. An owner on another machine counts as dead once its beat stands still, and an owner that finds
another one in its lock file ends at once.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from kumi.errors import RefusedError
from kumi.files.output import open_append
from kumi.files.untrusted import read_regular, strict_json

LOCK = ".lock"
# Seconds between two beats of an owner.
_BEAT_SECONDS = 2.0
# Errors of file systems without locks.
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


@dataclass(frozen=True)
class LockOwner:
    """The process that leads a run.

    `token`: random, so that no two owners are equal.
    `machine`: an id of the machine, which changes when the machine starts anew.
    """

    token: str
    host: str
    machine: str
    pid: int
    beat: int = 0


@contextmanager
def lock_folder(out: Path, patience: float = 15.0) -> Iterator[None]:
    """Take an exclusive lock on the folder `out`.

    Wait at most `patience` seconds for ranks of a killed run to end, and as long for a sign of life of an owner on
    another machine. Raise RefusedError if the folder is in use.
    """
    with open_append(out / LOCK) as file:
        for attempt in range(int(patience / 0.1) + 1):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if attempt == int(patience / 0.1):
                    raise _in_use(out, _read(out)) from None
                time.sleep(0.1)
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                break
        _check_other_machine(out, patience)
        owner = LockOwner(secrets.token_hex(8), socket.gethostname(), _machine(), os.getpid())
        _write(file.fileno(), owner)
        ended = threading.Event()
        thread = threading.Thread(target=_beat, args=(out, file.fileno(), owner, ended), name="kumi-lock", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            with suppress(OSError):
                os.ftruncate(file.fileno(), 0)


def _check_other_machine(out: Path, patience: float) -> None:
    """Raise RefusedError if the lock file has an owner on another machine whose beat goes on."""
    first = _read(out)
    if first is None or first.machine == _machine():
        return
    until = time.monotonic() + patience
    while time.monotonic() < until:
        time.sleep(_BEAT_SECONDS / 4)
        owner = _read(out)
        if owner is None:
            return
        if owner != first:
            raise _in_use(out, owner)


def _in_use(out: Path, owner: LockOwner | None) -> RefusedError:
    by = "" if owner is None else f" (process {owner.pid} on {owner.host})"
    return RefusedError(f"train.out: {out} is in use by another kumi process{by}; wait for it, or stop it")


def _beat(out: Path, handle: int, owner: LockOwner, ended: threading.Event) -> None:
    """Count the owner's beat up until `ended` is set; end this process if another has taken the folder."""
    count = 0
    while not ended.wait(_BEAT_SECONDS):
        present = _read(out)
        if present is not None and present.token != owner.token:
            print(
                f"{RefusedError.__name__}: train.out: {out} was taken over by another kumi process (process "
                f"{present.pid} on {present.host}), because this one gave no sign of life; it ends now, without saving",
                file=sys.stderr,
                flush=True,
            )
            os._exit(RefusedError.exit_code)
        count += 1
        with suppress(OSError):  # such as a full disk, which does not end the run
            _write(handle, LockOwner(owner.token, owner.host, owner.machine, owner.pid, count))


def _write(handle: int, owner: LockOwner) -> None:
    os.ftruncate(handle, 0)  # the handle appends
    os.write(handle, json.dumps(asdict(owner)).encode())


def _read(out: Path) -> LockOwner | None:
    """Return the owner in the lock file; None if there is none, or it is just being written."""
    try:
        return LockOwner(**strict_json(read_regular(out / LOCK, 4096)))
    except (OSError, ValueError, TypeError):
        return None


def _machine() -> str:
    """Return `LockOwner.machine` of this machine."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # not Linux
        return socket.gethostname()
