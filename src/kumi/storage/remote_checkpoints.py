"""Checkpoints of a run on a store: upload, list, remove and download them.

A checkpoint on a store is the same folder as on a disk. Its index.json is uploaded last and removed first, so a folder
with an index is a complete checkpoint. A folder without an index is being uploaded or removed, or was interrupted.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from pathlib import Path

from kumi.errors import ConfigError, RefusedError
from kumi.files.output import make_folder, remove_file, remove_tree
from kumi.files.untrusted import CONFIG, open_regular, strict_json
from kumi.remote.addresses import join_url
from kumi.remote.cache_folder import make_room
from kumi.remote.fetched_files import download_files
from kumi.remote.part_upload import discard_uploads, upload_file
from kumi.remote.remote_store import RemoteStore
from kumi.storage.folders import BEST, step_folder
from kumi.storage.read import Checkpoint
from kumi.storage.read import open as open_checkpoint

ROOT, INDEX = "checkpoints", "index.json"
_STEP = re.compile(r"step_(\d{6,})")


def remote_name(step: int) -> str:
    """Return the name of the folder of the checkpoint of `step`, relative to the run."""
    return f"{ROOT}/{step_folder('', step)}"


def complete_steps(store: RemoteStore) -> list[int]:
    """Return the steps of the run's complete checkpoints on the store, in order."""
    return [step for step in _steps(store) if store.info(f"{remote_name(step)}/{INDEX}") is not None]


def _steps(store: RemoteStore) -> list[int]:
    """Return the steps of all folders of checkpoints, in order, complete or not."""
    return sorted(int(match[1]) for name in store.list_folder(ROOT) if (match := _STEP.fullmatch(name)))


def remote_best_step(store: RemoteStore) -> int | None:
    """Return the step that best.json on the store names; None without a valid file."""
    name = f"{ROOT}/{BEST}"
    file = store.info(name)
    if file is None or file.size > CONFIG.size:
        return None
    with suppress(ValueError, FileNotFoundError):
        content = strict_json(store.read(name, 0, file.size), CONFIG)
        step = content.get("step") if isinstance(content, dict) else None
        return step if type(step) is int else None
    return None


def upload_checkpoint(
    store: RemoteStore,
    folder: Path,
    step: int,
    check: Callable[[], None] = lambda: None,
    progress: Callable[[int], None] = lambda count: None,
) -> None:
    """Upload the complete checkpoint in `folder` as that of `step`, unless the store has a complete one.

    `check` is called before the index is written, which completes the checkpoint, and may raise. `progress` is called
    with the bytes of each part that is uploaded. Raise FileNotFoundError if a file of `folder` is gone, OSError if the
    store then lists other files, and the errors of the store.
    """
    target = remote_name(step)
    if store.info(f"{target}/{INDEX}") is not None:
        return
    names = sorted(path.name for path in folder.iterdir() if path.is_file() and path.name != INDEX)
    expected = {f"{target}/{name}" for name in names}
    # Other files are left from an interrupted upload, of a save of this step by more ranks.
    store.remove([name for name in store.list_files(target) if name not in expected])
    sizes = {f"{target}/{name}": upload_file(store, folder / name, f"{target}/{name}", progress) for name in names}
    stored = {name: file.size for name, file in store.list_files(target).items()}
    if stored != sizes:
        raise OSError(f"{join_url(store.url, target)}: the store has other files than were uploaded")
    check()
    upload_file(store, folder / INDEX, f"{target}/{INDEX}", progress)


def prune(store: RemoteStore, keep: int, protect: Collection[int] = ()) -> list[int]:
    """Remove all complete checkpoints except the newest `keep` and those in `protect`; return the removed steps.

    Incomplete checkpoints of steps before the newest complete one are removed, too.
    """
    complete = complete_steps(store)
    outdated = [step for step in complete[:-keep] if step not in protect]
    leftovers = [step for step in _steps(store) if complete and step < complete[-1] and step not in complete]
    for step in [*outdated, *leftovers]:
        folder = remote_name(step)
        store.remove([f"{folder}/{INDEX}"])
        store.remove(list(store.list_files(folder)))
        discard_uploads(store, folder)
    return outdated


def download_checkpoint(store: RemoteStore, step: int, root: Path, incoming: Path) -> Path:
    """Download the complete checkpoint of `step` into the folder `root` of checkpoints, where it appears when it is
    complete and its checksums are verified; return its folder.

    The files so far are in `incoming`, from which an interrupted download goes on. Raise RefusedError if the checkpoint
    is damaged on the store.
    """
    target, folder = step_folder(root, step), step_folder(incoming, step)
    make_folder(incoming)
    for _ in range(2):  # damage on the way is repaired by fetching the file again
        fetch_checkpoint(store, remote_name(step), folder)
        damaged = list(_damaged_files(open_checkpoint(folder)))
        if not damaged:
            make_folder(root)
            folder.rename(target)
            return target
        for name in damaged:
            remove_file(folder / name)
    remove_tree(folder)
    url = join_url(store.url, remote_name(step))
    raise RefusedError(
        f"{url}/{damaged[0]}: the checkpoint is damaged on the store, its bytes do not match their checksums; remove "
        f"{url} to continue from the checkpoint before it"
    )


def fetch_checkpoint(store: RemoteStore, name: str, folder: Path) -> None:
    """Download the index of the checkpoint `name` of `store` to `folder`, and then its other files that `folder` lacks.

    Raise ConfigError if the checkpoint is incomplete.
    """
    listed = store.list_files(name)
    index = f"{name}/{INDEX}" if name else INDEX
    if index not in listed:
        raise ConfigError(
            f"{join_url(store.url, name)}: has no complete checkpoint, because {INDEX} is missing; name another one"
        )
    relative = {path.removeprefix(f"{name}/") if name else path: file for path, file in listed.items()}
    missing = {}
    for path, file in relative.items():
        local = folder / path
        if path == INDEX or not local.is_file() or local.lstat().st_size != file.size:
            missing[path] = file
    make_room(sum(file.size for file in missing.values()), f"the files of {join_url(store.url, name)}")
    make_folder(folder)
    view = store.below(name)
    download_files(view, {INDEX: missing.pop(INDEX)}, folder)
    download_files(view, missing, folder)


def _damaged_files(saved: Checkpoint) -> Iterator[str]:
    """Yield the shards of `saved` with a block that does not match its checksum, each once."""
    pieces = [(name, piece) for name, tensor in saved.tensors.items() for piece in tensor.pieces]
    for file in saved.files:
        handle = open_regular(saved.folder / file)
        try:
            blocks = (block for name, piece in pieces if piece.file == file for block in saved.blocks(name, piece))
            if any(zlib.crc32(os.pread(handle, size, offset)) != crc32 for offset, size, crc32 in blocks):
                yield file
        finally:
            os.close(handle)
