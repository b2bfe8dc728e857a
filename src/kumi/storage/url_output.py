"""Write a folder whose place is a URL: locally first, then uploaded; an interrupted upload goes on."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kumi.errors import CommunicationError, ConfigError, KumiError, RefusedError
from kumi.files.output import remove_tree, write_text
from kumi.files.untrusted import read_object
from kumi.progress import show_progress
from kumi.remote.addresses import check_url
from kumi.remote.cache_folder import OUTPUTS, copy_of, making
from kumi.remote.part_upload import upload_file
from kumi.remote.remote_store import RemoteStore, open_store
from kumi.storage.run_mirror import LAST_FILES

_NOTE = "output.json"


def write_to_url(url: str, key: str, request: Mapping[str, Any], write: Callable[[Path], str]) -> str:
    """Upload the folder that `write` writes, as `url`, the value of `key`; return its message with the URL in it.

    `request` (JSON data) describes what is written: if an earlier call with an equal one was interrupted during the
    upload, only the rest is uploaded. Raise RefusedError if the URL has files already, and CommunicationError if the
    upload fails; the local folder stays then.
    """
    check_url(url, key)
    copy = copy_of(OUTPUTS, url)
    folder = copy / "content"
    with making(copy), open_store(url, key) as store:
        message = _written_message(copy, request)
        present = store.list_files()
        if message is None:
            if present:
                raise RefusedError(
                    f"{key}: {url} has {len(present)} files already, such as {next(iter(present))}; name another URL, "
                    f"or remove them"
                )
            remove_tree(folder)
            message = write(folder).replace(str(folder), url)
            write_text(copy / _NOTE, json.dumps({"request": dict(request), "message": message}))
        try:
            upload_folder(store, folder)
        except (KumiError, OSError) as error:
            if isinstance(error, ConfigError):
                raise
            raise CommunicationError(
                f"{error}; the folder is complete in {folder}: run the same command again to upload the rest"
            ) from None
    remove_tree(copy)
    return message


def upload_folder(store: RemoteStore, folder: Path) -> None:
    """Upload the files of `folder`, with a bar; the files without which no program opens it last."""
    names = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file()]
    names.sort(key=lambda name: name in LAST_FILES)
    present = store.list_files()
    total, done = sum((folder / name).stat().st_size for name in names), 0
    with show_progress(f"uploading to {store.url}", max(total, 1)) as update:

        def progress(count: int) -> None:
            nonlocal done
            done += count
            update(done)

        for name in names:
            size = (folder / name).stat().st_size
            if name in present and present[name].size == size and name not in LAST_FILES:
                progress(size)  # uploaded by the interrupted call: this process wrote nothing since
            else:
                upload_file(store, folder / name, name, progress)


def _written_message(copy: Path, request: Mapping[str, Any]) -> str | None:
    """Return the message of an earlier call with an equal `request`, whose folder is complete; else None."""
    try:
        note = read_object(copy, _NOTE, RefusedError)
    except RefusedError:
        return None
    return str(note["message"]) if note.get("request") == dict(request) else None
