"""A run whose train.out is a URL: it runs in a local folder, which is downloaded from the object store at that URL
before and uploaded there meanwhile.

pull_remote(config)      before anything in the run folder is read
check_shared_folder(...) on the other ranks: the local folder must be the one of rank 0
mirrored(run)            while the run trains and exports
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kumi.config import ResolvedRun, RunConfig
from kumi.errors import ConfigError, KumiError, SaveError
from kumi.files.output import write_text
from kumi.files.untrusted import read_object
from kumi.remote.addresses import check_url, is_url
from kumi.remote.cache_folder import cache_line, local_run_folder, make_room, mark_uploaded
from kumi.remote.remote_store import open_store
from kumi.storage.mirror_process import MirrorProcess
from kumi.storage.run_download import pull_run
from kumi.storage.run_mirror import MirrorTask, claim
from kumi.train.folder_lock import LOCK
from kumi.train.prepare_data import tokenizer_folder
from kumi.units import format_bytes

# A file beside the local run folder with a random mark, which rank 0 writes at each start of the run: a rank that reads
# another mark, or none, sees another folder.
_START_FILE = "start.json"
# The remedy in errors about nodes that do not have the same local run folder.
SHARED_CACHE = "set KUMI_CACHE to a folder that all machines share, since all ranks of the run write one local folder"


def pull_remote(config: RunConfig, *, show: bool = True) -> None:
    """If train.out is a URL, download into the local run folder what it lacks of the run in the store. `show`: print
    what was done.

    Raise ConfigError if the store refuses access, CommunicationError if it cannot be reached.
    """
    url = config.train.out
    if not is_url(url):
        return
    check_url(url, "train.out")
    out = local_run_folder(url)
    if show:
        print(f"store      {url}, written in {out}\ncache      {cache_line()}", flush=True)
    lines = pull_run(url, out.parent, out, LOCK)
    for line in lines if show else ():
        print(f"fetched    {line}", flush=True)


def reserve_disk(run: ResolvedRun, size: int) -> None:
    """Make room in the cache for the checkpoints of `run`, each of `size` bytes, and print how many there are at most.

    Raise RefusedError if the cache has no room for them.
    """
    at_most = run.config.checkpoints_at_most
    make_room(at_most * size, f"{at_most} checkpoints of {format_bytes(size)}")
    print(
        f"disk       at most {at_most} checkpoints of {format_bytes(size)} in {run.out}, one of them for its upload",
        flush=True,
    )


@contextmanager
def mirrored(run: ResolvedRun) -> Iterator[None]:
    """Upload the run folder of `run` during the block and after it, if train.out is a URL.

    The end of the block waits for the uploads, also after a KumiError; other exceptions stop them. Raise SaveError if
    they fail, ConfigError or CommunicationError if the store cannot be written at the start.
    """
    url = run.config.train.out
    if not is_url(url):
        yield
        return
    copy, checkpoint = run.out.parent, run.config.checkpoint
    attempt = secrets.token_hex(8)
    with open_store(url, "train.out") as store:
        previous = claim(store, attempt)
    mark_uploaded(copy, uploaded=False)
    task = MirrorTask(
        url,
        str(run.out),
        str(copy / "uploading"),
        str(tokenizer_folder(run).resolve()),
        attempt,
        previous,
        checkpoint.keep,
        checkpoint.upload_timeout_s,
    )
    mirror = MirrorProcess(task)
    try:
        yield
    except KumiError:
        try:
            mirror.finish()
        except SaveError as error:
            print(f"upload     {error}", flush=True)
        raise
    except BaseException:
        mirror.stop()
        raise
    mirror.finish()
    mark_uploaded(copy, uploaded=True)
    print(f"uploaded   {url}", flush=True)


def mark_folder(run: ResolvedRun) -> str:
    """Write a new random mark beside the local run folder, and return the mark; "" if train.out is no URL."""
    if not is_url(run.config.train.out):
        return ""
    mark = secrets.token_hex(8)
    write_text(run.out.parent / _START_FILE, json.dumps({"start": mark}))
    return mark


def check_shared_folder(config: RunConfig, mark: str) -> None:
    """Raise ConfigError unless this rank sees the local run folder of rank 0, whose `mark_folder` returned `mark`."""
    folder = local_run_folder(config.train.out).parent
    if mark and _read_mark(folder) != mark:
        raise ConfigError(
            f"train.out: {config.train.out} is written in {folder}, which is not the same folder on this machine as on "
            f"that of rank 0; {SHARED_CACHE}"
        )


def _read_mark(folder: Path) -> object:
    """Return the mark that `mark_folder` wrote in `folder`; None without one."""
    try:
        return read_object(folder, _START_FILE).get("start")
    except ConfigError:
        return None
