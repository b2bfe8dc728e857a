"""The files of a URL as local files: in the cache, as the store has them now.

A file that the cache has with the store's size and version is not fetched again. The copy is in the folder `content`,
and `manifest.json` has the size and version of each of its files.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any

from kumi.errors import ConfigError
from kumi.files.output import make_folder, remove_file, write_text
from kumi.files.untrusted import INDEX, read_regular, strict_json
from kumi.progress import show_progress
from kumi.remote.cache_folder import FILES, copy_of, make_room, making
from kumi.remote.part_download import download_file
from kumi.remote.part_upload import PART_BYTES
from kumi.remote.remote_store import RemoteFile, RemoteStore, open_store

_CONTENT, _MANIFEST = "content", "manifest.json"
# Small files that are fetched at a time.
_PARALLEL = 8

# Called with the name of a file relative to the URL: whether to fetch it.
Select = Callable[[str], bool]


def fetch_folder(url: str, key: str, select: Select = lambda name: True) -> Path:
    """Return the local folder with the files of the folder `url` that `select` takes; errors as in `fetch_files`."""
    return fetch_files(url, key, select)[0]


def fetch_files(url: str, key: str, select: Select) -> tuple[Path, list[str]]:
    """Return a local folder with files of the folder `url`, and the names of those that `select` takes.

    `key`: the run-file key or flag that has the value `url`. Raise ConfigError if `select` takes none or the store
    refuses access; CommunicationError if the store cannot be reached; RefusedError if the cache has no room.
    """
    copy = copy_of(FILES, url)
    with making(copy), open_store(url, key) as store:
        listed = store.list_files()
        files = {name: file for name, file in listed.items() if select(name)}
        if not files:
            raise ConfigError(
                f"{key}: {url} has {len(listed)} files, but none of those that are needed here; correct the URL"
            )
        _forget(copy, [name for name in _read_manifest(copy) if name not in listed])
        update_copy(store, copy, files)
    return copy / _CONTENT, list(files)


def update_copy(store: RemoteStore, copy: Path, files: Mapping[str, RemoteFile]) -> None:
    """Fetch the `files` of `store` that the folder `copy` lacks or has in an old version; the caller locks `copy`."""
    content, manifest = copy / _CONTENT, _read_manifest(copy)
    make_folder(content)
    listed = {name: [file.size, file.version] for name, file in files.items()}
    stale = [name for name, entry in manifest.items() if name in listed and listed[name] != entry]
    for name in stale:
        remove_file(content / name)
        del manifest[name]
    missing = {name: file for name, file in files.items() if not _is_present(content / name, manifest.get(name), file)}
    if missing:
        make_room(sum(file.size for file in missing.values()), f"the files of {store.url}")

    def note(name: str) -> None:
        manifest[name] = listed[name]
        _write_manifest(copy, manifest)

    download_files(store, missing, content, note)


def _forget(copy: Path, names: Sequence[str]) -> None:
    """Remove the files `names` from the locked folder `copy`: the store has them no more."""
    if names:
        manifest = {name: entry for name, entry in _read_manifest(copy).items() if name not in names}
        _write_manifest(copy, manifest)
        for name in names:
            remove_file(copy / _CONTENT / name)


def download_files(
    store: RemoteStore, files: Mapping[str, RemoteFile], folder: Path, note: Callable[[str], None] = lambda name: None
) -> None:
    """Download `files` of `store` into `folder`, small ones side by side; call `note` with each completed name."""
    total, lock, done = sum(file.size for file in files.values()), Lock(), 0
    with show_progress(f"downloading {store.url}", total, enabled=total > 0) as update:

        def progress(count: int) -> None:
            nonlocal done
            with lock:
                done += count
                update(done)

        def fetch(name: str) -> None:
            download_file(store, name, files[name], folder / name, progress)
            with lock:
                note(name)

        small = [name for name, file in files.items() if file.size <= PART_BYTES]
        with ThreadPoolExecutor(_PARALLEL, thread_name_prefix="kumi-fetch") as pool:
            for answer in [pool.submit(fetch, name) for name in small]:
                answer.result()
        for name in [name for name in files if files[name].size > PART_BYTES]:
            fetch(name)


def _is_present(path: Path, entry: Any, file: RemoteFile) -> bool:
    """Return True if `path` is a copy of `file`; `entry` is its size and version in the manifest."""
    # Without a version, the same size says little.
    return entry == [file.size, file.version] and bool(file.version) and _size_of(path) == file.size


def _size_of(path: Path) -> int | None:
    return path.lstat().st_size if path.is_file() and not path.is_symlink() else None


def _read_manifest(copy: Path) -> dict[str, Any]:
    """Return [size, version] of each file that the folder `copy` has; {} for a missing or damaged manifest."""
    try:
        content = strict_json(read_regular(copy / _MANIFEST, INDEX.size), INDEX)
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _write_manifest(copy: Path, manifest: Mapping[str, Any]) -> None:
    part = copy / f"{_MANIFEST}.part"
    write_text(part, json.dumps(manifest))
    part.replace(copy / _MANIFEST)
