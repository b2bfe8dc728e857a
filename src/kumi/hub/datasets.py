"""Fetch the data files of a hub dataset at one commit, into the hub client's cache."""

from __future__ import annotations

import fnmatch
import functools
import glob
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from kumi.errors import ConfigError
from kumi.hub.fetch import Snapshot, is_id, split
from kumi.hub.reach import from_hub
from kumi.paths import cwd_note

SCHEME = "hf://datasets/"
# In order of preference: a repository often has the same rows in several formats, and only the first of these is read.
_SUFFIXES = (".parquet", ".arrow", ".jsonl", ".ndjson", ".json")
_COMPRESSED = (".gz", ".zst")
# JSON files that describe the data.
_NO_DATA = frozenset({"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json", "config.json"})
# The end of the name of one of several files of a split: train-00003-of-00017, or train/0003.
_SHARD = re.compile(r"-(\d{5})-of-(\d{5})$|/\d{4,}$")


def is_dataset(path: str) -> bool:
    """Return True if the data path names a hub dataset: `hf://datasets/OWNER/NAME`, or a hub id OWNER/NAME.

    Both may have @REVISION behind NAME, and the first also a glob of files behind that. A path OWNER/NAME is a local
    path if OWNER exists here or NAME has a suffix, so that a mistyped path causes no request to the hub.
    """
    if path.startswith(SCHEME):
        return True
    name = path.split("@")[0]
    return is_id(path) and not Path(path.split("/")[0]).exists() and _suffix(name) == "" and not Path(name).suffix


@dataclass(frozen=True)
class Dataset:
    """The data files of a hub dataset, local copies at the commit of `snapshot`."""

    snapshot: Snapshot
    files: tuple[Path, ...]


@functools.cache
def fetch_dataset(path: str, commit: str | None = None) -> Dataset:
    """Fetch the data files of the dataset `path` (see `is_dataset`); without a glob those of the train split.

    `commit` selects a commit instead of the newest. If the hub is unreachable, or HF_HUB_OFFLINE is set, the local
    cache is used. Raise ConfigError when the hub and the cache both lack the files, or the repository has several
    splits and not exactly one of them is named train.
    """
    name, revision, pattern = _parse(path)
    folder, files = from_hub(
        partial(_download, path, name, commit or revision, pattern),
        name,
        commit or revision,
        lambda reason: ConfigError(
            f"data source {path!r} is not a local file, and fetching the dataset from the hub failed ({reason}); name "
            f"a file or folder{cwd_note(path)}"
        ),
    )
    return Dataset(Snapshot(folder, name, revision, folder.name), tuple(folder / file for file in files))


def _parse(path: str) -> tuple[str, str | None, str]:
    """Return the repository, revision and glob of `path`. Raise ConfigError unless it has a form of `is_dataset`."""
    parts = path.removeprefix(SCHEME).split("/", 2)
    identity = split("/".join(parts[:2]))
    if identity is None:
        raise ConfigError(f"data source {path!r}: not {SCHEME}OWNER/NAME[@REVISION][/GLOB]; correct the path")
    return (*identity, parts[2] if len(parts) > 2 else "")


def _download(path: str, name: str, revision: str | None, pattern: str, cached: bool) -> tuple[Path, list[str]]:
    """Download the files that `pattern` selects; return their folder and names. With `cached`, use only the cache.

    Raise the errors of the hub client, and ConfigError as `select_files` does or if the cache lacks some of the files.
    """
    from huggingface_hub import HfApi, snapshot_download

    where: dict[str, Any] = {"repo_type": "dataset", "revision": revision}
    if cached:
        # A pattern that matches no file: the client refuses a cached snapshot that lacks any file of the pattern.
        folder = Path(snapshot_download(name, allow_patterns=["-"], local_files_only=True, **where))
        names = [file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()]
        files = select_files(path, names, pattern)
        _refuse_missing_shards(path, files)
        return folder, files
    names = HfApi().list_repo_files(name, **where)
    files = select_files(path, names, pattern)
    exact = [glob.escape(file) for file in files]
    return Path(snapshot_download(name, allow_patterns=exact, **where)), files


def select_files(path: str, names: Sequence[str], pattern: str) -> list[str]:
    """Return the data files among `names` that `pattern` matches; without one, those of the only split or of train.

    Raise ConfigError when there are none, or several splits and not exactly one of them is named train.
    """
    data = [name for name in sorted(names) if _suffix(name) and name.rsplit("/", 1)[-1] not in _NO_DATA]
    if pattern:
        matches = [
            name for name in data if fnmatch.fnmatchcase(name, pattern) or name.startswith(pattern.rstrip("/") + "/")
        ]
        if not matches:
            shown = ", ".join(data[:5]) or "none"
            raise ConfigError(f"data source {path!r}: no data file of the dataset matches {pattern!r} (it has {shown})")
        return matches
    for suffix in _SUFFIXES:
        files = [name for name in data if _suffix(name) == suffix]
        if files:
            return _only_split(path, files)
    raise ConfigError(
        f"data source {path!r}: the dataset has no file that kumi reads ({', '.join(_SUFFIXES)}); save it with "
        "`datasets` as parquet"
    )


def _only_split(path: str, files: list[str]) -> list[str]:
    """Return the files of the only split or of train. Raise ConfigError as `select_files` does."""
    splits: dict[str, list[str]] = defaultdict(list)
    for file in files:
        stem = file.removesuffix(_compression(file)).removesuffix(_suffix(file))
        splits[_SHARD.sub("", stem)].append(file)
    train = [split_name for split_name in splits if split_name.rsplit("/", 1)[-1] == "train"]
    chosen = list(splits) if len(splits) == 1 else train
    if len(chosen) != 1:
        name = path.removeprefix(SCHEME)
        shown = ", ".join(list(splits)[:8])
        raise ConfigError(
            f"data source {path!r}: the dataset has several parts ({shown}), and not exactly one of them is train; "
            f"name one, such as {SCHEME}{name}/{next(iter(splits))}*"
        )
    return splits[chosen[0]]


def _refuse_missing_shards(path: str, files: Sequence[str]) -> None:
    """Raise ConfigError if `files`, those of the cache, are some of several shards and others are missing."""
    shards: dict[tuple[str, str], set[str]] = defaultdict(set)
    for file in files:
        match = _SHARD.search(file.removesuffix(_compression(file)).removesuffix(_suffix(file)))
        if match and match[2]:
            shards[file[: match.start()], match[2]].add(match[1])
    for (stem, count), numbers in shards.items():
        if len(numbers) < int(count):
            raise ConfigError(
                f"data source {path!r}: the hub is unreachable, and the local cache has {len(numbers)} of {int(count)} "
                f"files of {stem}; run again with the network"
            )


def _compression(name: str) -> str:
    return next((suffix for suffix in _COMPRESSED if name.endswith(suffix)), "")


def _suffix(name: str) -> str:
    """Return the suffix of a data file without that of its compression; "" for another file."""
    plain = name.removesuffix(_compression(name))
    return next((suffix for suffix in _SUFFIXES if plain.endswith(suffix)), "")
