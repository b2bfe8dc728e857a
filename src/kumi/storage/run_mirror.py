"""Copy a run folder to a store while the run goes on: its complete checkpoints, and its other files beside them.

    a checkpoint is complete in the run folder
      -> hard links to its files in `uploading`, which rotation of the run folder does not touch
      -> config, metrics, logs and the like -> the checkpoint, its index last -> old checkpoints of the store removed

Only the newest complete checkpoint and the best one are uploaded: where the store is slower than the run, those in
between are left out. The disk therefore has at most one checkpoint more than without a store.
"""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kumi.errors import ConfigError, KumiError, RefusedError, SaveError
from kumi.files.output import make_folder, remove_tree, write_text
from kumi.files.untrusted import CONFIG, INDEX, read_object, strict_json
from kumi.remote.part_upload import upload_file
from kumi.remote.remote_store import RemoteStore
from kumi.storage.folders import BEST, best_step, latest, list_complete, step_folder, step_of
from kumi.storage.remote_checkpoints import ROOT, prune, upload_checkpoint

OWNER = "owner.json"
# A file beside the checkpoints that are being uploaded: it lists the other files of the run that the store has already.
_STATE_FILE = "uploaded.json"
# Folder of the tokenizer within the run on a store, and the endings of its files.
TOKENIZER, _TOKENIZER_FILES = "tokenizer", (".json", ".jinja", ".model", ".txt")
# Names in a run folder that are not uploaded with its other files: those that another machine makes anew, checkpoints,
# unfinished files, folders that were put aside, and hidden files such as locks.
_LOCAL_ONLY = re.compile(
    r"data|offload|checkpoints|rollouts|wandb|mlruns|\..*|.*\.part|.*\.unverified|(hf|adapter)\.\d+"
)
# Files without which no program opens a model's folder. They are uploaded last: a folder that opens is complete.
LAST_FILES = (
    "config.json",
    "adapter_config.json",
    "index.json",
    ".metadata",
    "metadata.json",
    "latest_checkpointed_iteration.txt",
)


class DisplacedError(SaveError):
    """Another start of the run writes to the store now."""


@dataclass(frozen=True)
class MirrorTask:
    """A run folder and its place on a store.

    out: the run folder. uploading: a folder on the same file system, for the checkpoints that are being uploaded.
    tokenizer: the folder of the run's tokenizer, which a run that is used elsewhere needs; "" if there is none.
    attempt: a random name of this start of the run. previous: the name of the start that wrote to the store before.
    keep: number of newest checkpoints to keep on the store, besides the best one.
    patience: at the end of the run, seconds without progress after which uploads are given up.
    """

    url: str
    out: str
    uploading: str
    tokenizer: str
    attempt: str
    previous: str
    keep: int
    patience: float

    def text(self) -> str:
        """Return the task as JSON, for the process that uploads."""
        return json.dumps(asdict(self))


class RunMirror:
    """The uploads of one start of a run. Call `update` again and again, and `finish` at the end.

    - `bytes_done`: bytes uploaded so far.
    - `progress_at`: when the last bytes were uploaded, by `time.monotonic`.
    - `on_progress`: called after each part of an upload.
    """

    def __init__(self, task: MirrorTask, store: RemoteStore) -> None:
        self._store, self._keep, self._attempt = store, task.keep, task.attempt
        self._out, self._uploading = Path(task.out), Path(task.uploading)
        self._tokenizer = Path(task.tokenizer) if task.tokenizer else None
        self._complete: set[int] = set()  # steps whose checkpoints this mirror has uploaded
        # Files other than checkpoints: name -> [bytes, modification time] when they were uploaded.
        self._uploaded = _read_uploaded(self._uploading, task.previous)
        self.bytes_done = 0
        self.progress_at = time.monotonic()
        self.on_progress: Callable[[], None] = lambda: None

    def update(self) -> bool:
        """Upload the newest complete checkpoint and the best one. Return True if one was uploaded now.

        Raise the errors of the store, and DisplacedError if another start of the run writes there now.
        """
        uploaded = [self._upload(folder) for folder in self._due()]
        return any(uploaded)

    def finish(self) -> None:
        """Upload everything that the store lacks. Raise as `update` does."""
        self.update()
        self._upload_files()
        self._upload_best()
        self._prune()

    def left(self) -> int:
        """Return about how many bytes are still to be uploaded."""
        files = [path for path in self._out.rglob("*") if path.is_file() and not path.is_symlink()]
        others = [path for path in files if not _LOCAL_ONLY.fullmatch(self._name(path).split("/")[0])]
        changed = [path for path in others if self._uploaded.get(self._name(path)) != _state(path)]
        checkpoints = [file for folder in self._due() for file in folder.iterdir()]
        return sum(path.stat().st_size for path in [*changed, *checkpoints])

    def _due(self) -> list[Path]:
        """Return the folders of the newest and the best complete checkpoint, without those uploaded already."""
        root = self._out / ROOT
        chosen = {latest(root), self._best()}
        return sorted(folder for folder in chosen if folder is not None and step_of(folder) not in self._complete)

    def _best(self) -> Path | None:
        """Return the folder of the best checkpoint; None if none is named, or the named one is not complete."""
        root = self._out / ROOT
        try:
            step = best_step(root)
        except RefusedError:
            return None
        folder = None if step is None else step_folder(root, step)
        return folder if folder in list_complete(root) else None  # rotation and best.json change one after the other

    def _upload(self, folder: Path) -> bool:
        """Upload the checkpoint in `folder` and the run's other files, then remove old checkpoints from the store.

        Return False if rotation removed `folder` meanwhile.
        """
        step = step_of(folder)
        files = self._linked(folder)
        if files is None:
            return False
        self._upload_files()
        try:
            upload_checkpoint(self._store, files, step, self._check_owner, self._advance)
        except FileNotFoundError:
            if folder in list_complete(self._out / ROOT):
                raise
            return False  # without hard links; a newer checkpoint is complete
        self._complete.add(step)
        remove_tree(step_folder(self._uploading, step))
        self._upload_best()
        self._prune()
        return True

    def _linked(self, folder: Path) -> Path | None:
        """Return a folder with hard links to the files of `folder`, or `folder` itself where links are impossible.

        Return None if rotation removed `folder` meanwhile. Links of other checkpoints are removed.
        """
        links = step_folder(self._uploading, step_of(folder))
        make_folder(self._uploading)
        for other in self._uploading.iterdir():
            if other != links and other.name != _STATE_FILE:
                remove_tree(other)
        try:
            if links.is_dir() and {path.name for path in links.iterdir()} == {path.name for path in folder.iterdir()}:
                return links
            remove_tree(links)
            make_folder(links)
            for path in folder.iterdir():
                os.link(path, links / path.name, follow_symlinks=False)
        except FileNotFoundError:
            return None
        except OSError:
            remove_tree(links)
            return folder
        return links

    def _upload_files(self) -> None:
        """Upload the files of the run folder that changed since their last upload, except checkpoints."""
        for path in sorted(self._out.iterdir()):
            if _LOCAL_ONLY.fullmatch(path.name) or path.is_symlink():
                continue
            if path.is_dir():
                self._upload_folder(path)
            else:
                self._upload_changed(path, path.name)
        for path in sorted(self._tokenizer.iterdir()) if self._tokenizer is not None else ():
            if path.name.endswith(_TOKENIZER_FILES):
                self._upload_changed(path.resolve(), f"{TOKENIZER}/{path.name}")
        _write_uploaded(self._uploading, self._attempt, self._uploaded)

    def _upload_folder(self, folder: Path) -> None:
        """Upload the changed files of `folder`, those in `LAST_FILES` last.

        If one of `LAST_FILES` changed, the folder has a new model: first the old `LAST_FILES` and all files that this
        folder does not have are removed from the store, so that nothing opens a mixture of two models.
        """
        paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink()]
        paths = [path for path in paths if "/." not in self._name(path)]
        changed = [path for path in paths if self._uploaded.get(self._name(path)) != _state(path)]
        last = [folder / name for name in LAST_FILES if folder / name in changed]
        if last:
            present = self._store.list_files(folder.name)
            openers = [f"{folder.name}/{name}" for name in LAST_FILES]
            self._store.remove([name for name in openers if name in present])
            local = {self._name(path) for path in paths}
            self._store.remove([name for name in present if name not in local and name not in openers])
        for path in [*(path for path in changed if path not in last), *last]:
            self._upload_changed(path, self._name(path))

    def _name(self, path: Path) -> str:
        return path.relative_to(self._out).as_posix()

    def _upload_changed(self, path: Path, name: str) -> None:
        """Upload the file `path` as `name` if it has changed since its last upload."""
        try:
            state = _state(path)
            if self._uploaded.get(name) != state:
                upload_file(self._store, path, name, self._advance)
                self._uploaded[name] = state
        except FileNotFoundError:  # renamed or removed meanwhile
            return

    def _upload_best(self) -> None:
        if (self._out / ROOT / BEST).is_file():
            self._upload_changed(self._out / ROOT / BEST, f"{ROOT}/{BEST}")

    def _prune(self) -> None:
        """Remove the checkpoints from the store that are neither the best one nor among the newest to keep."""
        self._check_owner()
        protected = self._best()
        prune(self._store, self._keep, [] if protected is None else [step_of(protected)])

    def _check_owner(self) -> None:
        """Raise DisplacedError if another start of the run has claimed the store since."""
        owner = read_owner(self._store)
        if owner.get("attempt") != self._attempt:
            raise DisplacedError(
                f"{self._store.url}: another start of this run, on {owner.get('host')} since {owner.get('since')}, "
                f"writes there now, so this one uploads nothing more; stop one of the two"
            )

    def _advance(self, count: int) -> None:
        self.bytes_done += count
        self.progress_at = time.monotonic()
        self.on_progress()


def claim(store: RemoteStore, attempt: str) -> str:
    """Write `attempt`, the name of this start of the run, to the store: only the latest start may upload there.

    Return the name of the start before it, or "". Raise ConfigError if the store refuses access, CommunicationError if
    it cannot be reached.
    """
    owner = {"attempt": attempt, "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
    previous = str(read_owner(store).get("attempt", ""))
    store.write(OWNER, json.dumps(owner).encode())
    return previous


def read_owner(store: RemoteStore) -> dict[str, Any]:
    """Return the content of owner.json; {} if there is none or it is damaged."""
    file = store.info(OWNER)
    if file is None or file.size > CONFIG.size:
        return {}
    try:
        content = strict_json(store.read(OWNER, 0, file.size), CONFIG)
    except (ValueError, FileNotFoundError):
        return {}
    return content if isinstance(content, dict) else {}


def _state(path: Path) -> list[int]:
    """Return the size and the modification time (ns) of a file, by which a change is noticed."""
    stat = path.lstat()
    return [stat.st_size, stat.st_mtime_ns]


def _read_uploaded(folder: Path, attempt: str) -> dict[str, list[int]]:
    """Return the files that the start `attempt` of the run has uploaded; {} if this machine did not make that start."""
    try:
        content = read_object(folder, _STATE_FILE, RefusedError, INDEX)
    except RefusedError:
        return {}
    files = content.get("files")
    return files if content.get("attempt") == attempt and isinstance(files, dict) else {}


def _write_uploaded(folder: Path, attempt: str, files: dict[str, list[int]]) -> None:
    """Record the `files` that the start `attempt` has uploaded, for `_read_uploaded` of the next start."""
    make_folder(folder)
    part = folder / f"{_STATE_FILE}.part"
    write_text(part, json.dumps({"attempt": attempt, "files": files}))
    part.replace(folder / _STATE_FILE)


def finish_with_retries(mirror: RunMirror, patience: float) -> None:
    """Finish `mirror`, again and again while uploads make progress. Raise the last error after `patience` seconds
    without progress; raise a ConfigError or a DisplacedError at once.
    """
    mirror.progress_at = time.monotonic()
    while True:
        try:
            mirror.finish()
            return
        except DisplacedError:
            raise
        except (KumiError, OSError) as error:
            if isinstance(error, ConfigError) or time.monotonic() - mirror.progress_at > patience:
                raise
        time.sleep(min(1.0, patience / 10))
