"""Write a folder to a URL: write it locally, then upload it; an interrupted upload is continued by the next call."""

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

# The file in the copy's folder that tells which request the complete local folder belongs to.
_NOTE = "output.json"


def write_to_url(url: str, key: str, request: Mapping[str, Any], write: Callable[[Path], str]) -> str:
    """Let `write` write a local folder, and upload it to `url`, the value of `key`.

    Return the message of `write`, with the URL in place of the local folder. `request` (JSON data) describes what is
    written: if an earlier call with an equal request was interrupted during the upload, only the rest is uploaded.
    Raise RefusedError if the URL has files already, and CommunicationError if the upload fails; the local folder stays
    then.
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
    """Upload the files of `folder`, with a bar; those in `LAST_FILES` last, as no program opens it without them."""
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
                progress(size)  # an interrupted call uploaded it, and the local file has not changed since
            else:
                upload_file(store, folder / name, name, progress)


def _written_message(copy: Path, request: Mapping[str, Any]) -> str | None:
    """Return the message of an earlier call with an equal `request` that has completed the local folder; else None."""
    try:
        note = read_object(copy, _NOTE, RefusedError)
    except RefusedError:
        return None
    return str(note["message"]) if note.get("request") == dict(request) else None
