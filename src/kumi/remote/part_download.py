"""Download files of any size in parts; an interrupted download goes on where it stopped.

`NAME.part` has the bytes so far, from the beginning of the file without a gap; `NAME.part.json` has the size and
version of the file to which they belong. The memory in use is that of a few parts.
"""

from __future__ import annotations

import json
import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from kumi.errors import CommunicationError
from kumi.files.output import open_append, open_new, remove_file, write_text
from kumi.files.untrusted import CONFIG, read_regular, strict_json
from kumi.remote.addresses import join_url
from kumi.remote.part_upload import PARALLEL, PART_BYTES, Progress
from kumi.remote.remote_store import RemoteFile, RemoteStore


def download_file(
    store: RemoteStore, name: str, file: RemoteFile, path: Path, progress: Progress = lambda count: None
) -> None:
    """Download the file `name` of `store`, listed as `file`, to `path`, which appears once it is complete.

    `path` gets the modification time that the store lists. Raise CommunicationError if the file changes meanwhile or
    has gone, and the errors of `kumi.remote.retries.with_retries`.
    """
    part, note = path.with_name(path.name + ".part"), path.with_name(path.name + ".part.json")
    path.parent.mkdir(parents=True, exist_ok=True)
    identity = {"size": file.size, "version": file.version}
    if not file.version or _read_note(note) != identity:
        remove_file(part)
        write_text(note, json.dumps(identity))
    try:
        _fetch_rest(store, name, file, part, progress)
        now = store.info(name)
    except FileNotFoundError:
        now = None
    if now is None or (now.size, now.version) != (file.size, file.version):
        remove_file(part)
        raise CommunicationError(
            f"{join_url(store.url, name)}: was replaced or removed while it was downloaded; run the same command again"
        )
    if file.modified is not None:
        os.utime(part, (file.modified, file.modified))
    part.replace(path)
    remove_file(note)


def _fetch_rest(store: RemoteStore, name: str, file: RemoteFile, part: Path, progress: Progress) -> None:
    """Append the missing bytes to the file `part`, in order; several requests are sent at a time."""
    with suppress(FileNotFoundError):
        if part.lstat().st_size > file.size:
            remove_file(part)
    if not part.exists():
        open_new(part, "wb").close()
    with open_append(part, "ab") as target, ThreadPoolExecutor(PARALLEL, thread_name_prefix="kumi-part") as pool:
        start = os.fstat(target.fileno()).st_size
        progress(start)
        starts = deque(range(start, file.size, PART_BYTES))
        answers: deque[Future[bytes]] = deque()
        try:
            while starts or answers:
                while starts and len(answers) < PARALLEL:
                    low = starts.popleft()
                    answers.append(pool.submit(store.read, name, low, min(low + PART_BYTES, file.size)))
                data = answers.popleft().result()
                target.write(data)
                progress(len(data))
        finally:
            for answer in answers:
                answer.cancel()


def _read_note(note: Path) -> object:
    """Return the content of NAME.part.json; None if it is missing or damaged."""
    try:
        return strict_json(read_regular(note, CONFIG.size), CONFIG)
    except (OSError, ValueError):
        return None
