"""Check of the store of a run whose train.out is a URL: this node may write, read and remove files there."""

from __future__ import annotations

import secrets
import time

from kumi.doctor.disk_checks import DOCTOR_FOLDER
from kumi.doctor.finding import Reading
from kumi.doctor.here import Here
from kumi.errors import KumiError
from kumi.remote.remote_store import RemoteStore, open_store

# Size of the file that is written: so small that the time is that of the requests, not of the bytes.
_BYTES = 4096


def store_access(here: Here) -> Reading:
    """Write a file below train.out, read it and remove it; a store that refuses one of these is a problem.

    A run writes checkpoints, reads them when it resumes, and removes old ones.
    """
    if here.run is None:
        return Reading(absent="no run file is given")
    url = here.run.url
    if not url:
        return Reading(absent="train.out is a folder")
    name = f"{DOCTOR_FOLDER}/{here.meeting.seat.node}-{secrets.token_hex(8)}"
    began = time.monotonic()
    try:
        with open_store(url, "train.out") as store:
            problem = _try_file(store, name, secrets.token_bytes(_BYTES))
    except KumiError as error:  # no file system for the scheme, or a secret in the URL
        problem = str(error)
    if problem:
        return Reading(problems=(problem,))
    return Reading(f"written, read and removed a file in {time.monotonic() - began:.1f} s")


def _try_file(store: RemoteStore, name: str, data: bytes) -> str:
    """Write `data` as the file `name`, read and remove it. Return what the store refuses first, or ""."""
    doing = "written"
    try:
        store.write(name, data)
        doing = "read"
        if store.read(name, 0, len(data)) != data:
            return f"{store.url}: a file has other bytes than were written"
        doing = "removed"
        store.remove([name])
        if store.info(name) is not None:
            return f"{store.url}: a file is still there after it was removed"
    except (KumiError, OSError) as error:
        return f"no file can be {doing}: {error}"
    return ""
