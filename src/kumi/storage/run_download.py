"""Bring a run from a store to this machine, to resume it or to use its model."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kumi.errors import ConfigError
from kumi.files.output import make_folder, open_append, remove_tree
from kumi.remote.addresses import join_url
from kumi.remote.cache_folder import FILES, copy_of, making
from kumi.remote.fetched_files import download_files, fetch_folder, update_copy
from kumi.remote.remote_store import RemoteFile, RemoteStore, open_store
from kumi.storage.folders import BEST, latest, list_complete, step_of
from kumi.storage.remote_checkpoints import (
    INDEX,
    ROOT,
    complete_steps,
    download_checkpoint,
    fetch_checkpoint,
    remote_best_step,
    remote_name,
)
from kumi.storage.run_mirror import TOKENIZER

# Files of the run folder that a resumed run reads, beside its checkpoint.
_STATE_FILES = ("config.toml", "plan.json", "sources.json", "metrics.jsonl", "probe.safetensors")
_CONFIG = "config.toml"


def pull_run(url: str, copy: Path, out: Path, lock: str) -> list[str]:
    """Bring the run at `url` to the run folder `out` in `copy`, if the store is ahead of it; return a line for each
    download.

    Downloads are the newest complete checkpoint, the best one, and the files that a resumed run reads. `lock`: the name
    of the file that a training process locks in `out`; while such a process runs, nothing is changed. Raise ConfigError
    if the run has checkpoints and no configuration.
    """
    with making(copy), open_store(url, "train.out") as store, _unless_training(out, lock) as idle:
        names = store.list_folder()
        if not idle or _CONFIG not in names:
            if idle and ROOT in names and complete_steps(store):
                raise ConfigError(f"train.out: {url} has checkpoints but no {_CONFIG}; restore it, or name another URL")
            return []
        steps, local = complete_steps(store), latest(out / ROOT)
        newest = steps[-1] if steps else None
        if (out / _CONFIG).exists() and (newest is None or (local is not None and step_of(local) >= newest)):
            return []
        return _pull(store, steps, copy, out)


def _pull(store: RemoteStore, steps: list[int], copy: Path, out: Path) -> list[str]:
    """Download the run's files, then the best and the newest of the complete checkpoints `steps`."""
    make_folder(out)
    files = {name: file for name in _STATE_FILES if (file := store.info(name)) is not None}
    download_files(store, files, out)
    lines = [f"{store.url}: the run's configuration and metrics"]
    best = remote_best_step(store)
    if best is not None and best in steps:
        make_folder(out / ROOT)
        _download_small(store, f"{ROOT}/{BEST}", out / ROOT)
    present = {step_of(folder) for folder in list_complete(out / ROOT)}
    # The newest one last: once it is here, nothing is left to bring.
    for step in dict.fromkeys([*([best] if best in steps else []), *steps[-1:]]):
        if step is not None and step not in present:
            folder = download_checkpoint(store, step, out / ROOT, copy / "incoming")
            lines.append(f"{join_url(store.url, remote_name(step))} -> {folder}")
    return lines


def _download_small(store: RemoteStore, name: str, folder: Path) -> None:
    """Download the file `name` of `store`, if there is one, into `folder`, under the last part of its name."""
    file = store.info(name)
    if file is not None:
        parent, _, last = name.rpartition("/")
        download_files(store.below(parent), {last: file}, folder)


@contextmanager
def _unless_training(out: Path, lock: str) -> Iterator[bool]:
    """Yield True, with the file `lock` of the run folder locked; False if a training process has locked it."""
    make_folder(out)
    with open_append(out / lock) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


def fetch_model(url: str, key: str, step: int | None = None) -> Path:
    """Return a local folder with the model at `url`: a Hugging Face folder, a checkpoint, or a run.

    The folder of a run has its configuration, its newest complete checkpoint, the best one and that of `step`. Raise
    ConfigError if `url` has no files, if its checkpoint is incomplete, or if the run has no checkpoint of `step`.
    """
    with open_store(url, key) as store:
        names = store.list_folder()
        name = url.rstrip("/").rpartition("/")[2]
        if INDEX in names or name.startswith("step_"):
            return _fetch_checkpoint(store, url, key)
        if ROOT in names and _CONFIG in names:
            return _fetch_run(store, url, step)
    # Subfolders of a Hugging Face folder have other models; those of a Megatron folder have its checkpoint.
    return fetch_folder(url, key, lambda name: "config.json" not in names or "/" not in name)


def _fetch_checkpoint(store: RemoteStore, url: str, key: str) -> Path:
    """Return the local copy of the checkpoint at `url`, with the configuration and tokenizer of its run beside it."""
    parent, _, name = url.rstrip("/").rpartition("/")
    copy = copy_of(FILES, url)
    folder = copy / ROOT / name
    with making(copy):
        fetch_checkpoint(store, "", folder)
        if parent.endswith(f"/{ROOT}"):
            with open_store(parent.removesuffix(f"/{ROOT}"), key) as run:
                files = run.list_files(TOKENIZER)
                if (config := run.info(_CONFIG)) is not None:
                    files[_CONFIG] = config
                download_files(run, files, copy)
    return folder


def _fetch_run(store: RemoteStore, url: str, step: int | None) -> Path:
    """Return the local copy of the run at `url`, with its newest checkpoint, the best one and that of `step`.

    Raise ConfigError if the run has no checkpoint of `step`.
    """
    copy = copy_of(FILES, url)
    with making(copy):
        files: dict[str, RemoteFile] = {
            name: file
            for name, file in store.list_files().items()
            if "/" not in name or name.split("/")[0] in ("hf", "adapter", TOKENIZER) or name == f"{ROOT}/{BEST}"
        }
        steps, best = complete_steps(store), remote_best_step(store)
        if step is not None and step not in steps:
            existing = f"its steps are {', '.join(map(str, steps))}" if steps else "it has no complete checkpoint"
            raise ConfigError(f"{url}: has no checkpoint of step {step}; {existing}")
        update_copy(store, copy, files)
        out = copy / "content"
        present = {step_of(folder) for folder in list_complete(out / ROOT)}
        needed = {*steps[-1:], *(step for step in (best, step) if step in steps)}
        for missing in needed - present:
            assert missing is not None, "a step of the list"
            download_checkpoint(store, missing, out / ROOT, copy / "incoming")
        for folder in list_complete(out / ROOT):
            if step_of(folder) not in steps:  # the store has removed it
                remove_tree(folder)
    return out
