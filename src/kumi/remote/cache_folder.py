"""The folder with local copies of the files of stores, and its size limit.

    $KUMI_CACHE, else ~/.cache/kumi/stores
      files/NAME-DIGEST/    files that were fetched from a URL (see `fetched_files`)
      runs/NAME-DIGEST/     the run folder of a run whose train.out is a URL
      outputs/NAME-DIGEST/  the output of a conversion until it is uploaded

Before more is stored, the least recently used copies are removed until the folder stays within $KUMI_CACHE_LIMIT, by
default half of its disk. Copies in use, outputs, and runs that are not uploaded completely stay.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from kumi.errors import ConfigError, RefusedError
from kumi.files.output import make_folder, open_append, remove_file, remove_tree
from kumi.remote.addresses import is_url, url_key
from kumi.units import format_bytes, parse_bytes

VARIABLE, LIMIT_VARIABLE = "KUMI_CACHE", "KUMI_CACHE_LIMIT"
FILES, RUNS, OUTPUTS = "files", "runs", "outputs"
# Files in the folder of a copy: a lock held while the copy is made, a lock held while it is used, a file whose
# modification time is that of the last use, and a file that exists if the run in the copy is uploaded.
_FETCH_LOCK, _USE_LOCK, _USED, _UPLOADED = ".fetch.lock", ".use.lock", ".used", ".uploaded"

# The locks on the copies that this process uses. It holds them until it ends; forked ranks share them.
_in_use: dict[Path, IO[str]] = {}


def cache_root() -> Path:
    """Return the folder with local copies; it need not exist."""
    named = os.environ.get(VARIABLE)
    if named:
        return Path(os.path.expanduser(named)).absolute()
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(home, "kumi", "stores").absolute()


def copy_of(kind: str, url: str) -> Path:
    """Return the folder of the local copy of `url`; `kind` is one of FILES, RUNS and OUTPUTS."""
    return cache_root() / kind / url_key(url)


def local_run_folder(out: str) -> Path:
    """Return the folder in which a run with train.out = `out` is written: `out`, or the local copy of a URL."""
    return copy_of(RUNS, out) / "run" if is_url(out) else Path(os.path.expanduser(out))


def cache_limit() -> int:
    """Return the limit of the cache in bytes. Raise ConfigError if $KUMI_CACHE_LIMIT is not a size."""
    text = os.environ.get(LIMIT_VARIABLE)
    if text:
        try:
            return parse_bytes(text)
        except ConfigError as error:
            raise ConfigError(f"{LIMIT_VARIABLE}: {error}") from None
    return shutil.disk_usage(_existing(cache_root())).total // 2


def cache_line() -> str:
    """Return a sentence about the cache for the terminal."""
    return (
        f"{cache_root()}: {format_bytes(_size(cache_root()))} of at most {format_bytes(cache_limit())} "
        f"({VARIABLE}, {LIMIT_VARIABLE})"
    )


@contextmanager
def making(copy: Path) -> Iterator[None]:
    """Create the folder `copy` of a local copy, and let no other process write to it during the block.

    The copy counts as in use until this process ends, so it is not removed before.
    """
    make_folder(copy)
    use(copy)
    with open_append(copy / _FETCH_LOCK) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def use(copy: Path) -> None:
    """Note the use of `copy` and protect it from removal until this process ends."""
    if copy not in _in_use:
        lock = open_append(copy / _USE_LOCK)
        fcntl.flock(lock, fcntl.LOCK_SH)
        _in_use[copy] = lock
    with open_append(copy / _USED):
        os.utime(copy / _USED)


def mark_uploaded(copy: Path, *, uploaded: bool) -> None:
    """Note whether the run in `copy` is uploaded completely: only then the copy may be removed."""
    if uploaded:
        open_append(copy / _UPLOADED).close()
    else:
        remove_file(copy / _UPLOADED)


def make_room(needed: int, what: str) -> None:
    """Remove the least recently used copies until `needed` more bytes fit. Raise RefusedError if they do not.

    `what`: the name of the new bytes, for the error.
    """
    root, limit = cache_root(), cache_limit()
    total = _size(root)
    for copy in _by_use(root):
        free = shutil.disk_usage(_existing(root)).free
        if total + needed <= limit and needed <= free:
            return
        total -= _remove(copy)
    free = shutil.disk_usage(_existing(root)).free
    if total + needed > limit or needed > free:
        raise RefusedError(
            f"{root}: {what} need {format_bytes(needed)}, but the cache has {format_bytes(total)} that are in use, its "
            f"limit is {format_bytes(limit)} and {format_bytes(free)} of the disk are free; raise {LIMIT_VARIABLE}, or "
            f"set {VARIABLE} to a folder on a larger disk"
        )


def _by_use(root: Path) -> list[Path]:
    """Return the copies that may be removed, the least recently used one first."""
    copies = [*(root / FILES).glob("*/"), *(path for path in (root / RUNS).glob("*/") if (path / _UPLOADED).exists())]
    return sorted((copy for copy in copies if copy not in _in_use), key=_last_use)


def _last_use(copy: Path) -> float:
    """Return the time of the last use of `copy`, in seconds since 1970; 0 if it was never used."""
    try:
        return (copy / _USED).stat().st_mtime
    except OSError:
        return 0.0


def _remove(copy: Path) -> int:
    """Remove `copy` unless a process uses it; return the bytes that this frees."""
    size = _size(copy)
    with open_append(copy / _USE_LOCK) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return 0
        remove_tree(copy)
    return size


def _size(folder: Path) -> int:
    """Return the bytes of the files below `folder` on the disk; a file with several names counts once."""
    sizes: dict[tuple[int, int], int] = {}
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                stat = os.lstat(os.path.join(parent, name))
                sizes[stat.st_dev, stat.st_ino] = stat.st_blocks * 512
    return sum(sizes.values())


def _existing(path: Path) -> Path:
    """Return `path`, or the nearest folder above it that exists."""
    while not path.exists():
        path = path.parent
    return path
