"""Fetch the files of a hub repository at one commit, into the hub client's cache."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kumi.errors import ConfigError, ModelError
from kumi.files.untrusted import INDEX, brief, read_object
from kumi.hub.reach import from_hub
from kumi.paths import cwd_note

_ID = re.compile(r"([\w-][\w.-]*/[\w-][\w.-]*)(?:@([\w][\w./-]*))?")

# Files of a repository other than weights: configurations, tokenizers, and the model card with its licence.
SMALL_SUFFIXES = (".json", ".jinja", ".model", ".txt", "README.md")
_SMALL = tuple(name if name == "README.md" else f"*{name}" for name in SMALL_SUFFIXES)  # as glob patterns
# Files in subfolders are ignored: they are the same weights in other formats, or other models.
_SUBFOLDERS = ("*/*",)
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


@dataclass(frozen=True)
class Snapshot:
    """A local copy in `folder` of the repository `name` at `commit`; `revision` is the requested revision."""

    folder: Path
    name: str
    revision: str | None
    commit: str


def is_id(source: str) -> bool:
    """Return True if `source` has the form of a hub id, with or without a revision; a relative path may have it too."""
    return _ID.fullmatch(source) is not None


def split(source: str) -> tuple[str, str | None] | None:
    """Return the repository and the revision (or None) of the hub id `source`; None if it is not a hub id."""
    match = _ID.fullmatch(source)
    return None if match is None else (match[1], match[2])


def fetch(source: str, key: str, *, commit: str | None = None, weights: bool = False) -> Snapshot:
    """Fetch the repository `source`, the value of `key`, without weights unless `weights` is true.

    `commit` selects a commit instead of the newest. If the hub is unreachable, or HF_HUB_OFFLINE is set, the local
    cache is used. Raise ConfigError when the hub and the cache both lack the files.
    """
    name, revision = _parse(source, key)

    def get(cached: bool) -> str:
        return _download(name, commit or revision, _SMALL, cached)

    folder = Path(from_hub(get, name, revision, partial(_not_fetched, source, key)))
    snapshot = Snapshot(folder, name, revision, folder.name)
    if weights:
        fetch_weights(snapshot)
    return snapshot


def fetch_weights(snapshot: Snapshot) -> None:
    """Download the missing safetensors files of `snapshot` to its folder.

    Raise ConfigError when the download fails, ModelError when the repository has no such files.
    """
    files = _weight_files(snapshot)
    if not all((snapshot.folder / file).is_file() for file in files):
        from_hub(
            lambda cached: _download(snapshot.name, snapshot.commit, files, cached),
            snapshot.name,
            snapshot.revision,
            lambda reason: ConfigError(
                f"{snapshot.name}: the weights could not be downloaded from the hub ({reason}); run the same command "
                f"again to continue, the files so far are kept"
            ),
        )
    missing = [file for file in files if not (snapshot.folder / file).is_file()]
    if missing:
        raise ModelError(
            f"{snapshot.name}: {missing[0]} is not in the repository at commit {snapshot.commit[:12]}, or "
            f"not in the local cache; kumi does not fetch pickled weights (.bin): save them as safetensors "
            f"with transformers' save_pretrained"
        )


def fetch_config(source: str, key: str) -> Path:
    """Fetch only config.json of the repository `source`, the value of `key`; return its path. Errors as in `fetch`."""
    name, revision = _parse(source, key)

    def get(cached: bool) -> str:
        from huggingface_hub import hf_hub_download

        return str(hf_hub_download(name, "config.json", revision=revision, local_files_only=cached))

    return Path(from_hub(get, name, revision, partial(_not_fetched, source, key)))


def _weight_files(snapshot: Snapshot) -> list[str]:
    """Return the names of the weight files in the index of `snapshot`; without an index, model.safetensors."""
    index = snapshot.folder / _INDEX
    if not index.exists():
        return [_SINGLE]
    try:
        files = sorted(set(read_object(snapshot.folder, _INDEX, bounds=INDEX)["weight_map"].values()))
    except (KeyError, AttributeError, TypeError) as error:
        raise ModelError(f"{index}: not a weight index ({error!r}); name another revision") from None
    for file in files:
        if not isinstance(file, str) or not re.fullmatch(r"[\w-][\w.-]*\.safetensors", file):
            raise ModelError(
                f"{index}: lists the weight file {brief(file)}; kumi reads only safetensors files in the folder of "
                f"the index"
            )
    if not files:
        raise ModelError(f"{index}: lists no files; name another revision")
    return files


def _parse(source: str, key: str) -> tuple[str, str | None]:
    """Return the repository and the revision of `source`. Raise ConfigError if it is not a hub id."""
    parts = split(source)
    if parts is None:
        raise ConfigError(
            f"{key}: {source!r} is neither a folder nor a hub id; {_remedy(source, key)}{cwd_note(source)}"
        )
    return parts


def _remedy(source: str, key: str) -> str:
    """Return what to do about a `source` that is no folder, as the end of a sentence."""
    required = "tokenizer.json" if key == "data.tokenizer" else "config.json"
    folder = Path(source)
    # The folder to which a run exports its model.
    if folder.name == "hf":
        return (
            f"it would be the export of a run: `kumi train` the run file with train.out={str(folder.parent)!r} first, "
            f"or name a folder with {required}"
        )
    return f"name a folder with {required}"


def _not_fetched(source: str, key: str, reason: str) -> ConfigError:
    """Return the error for a `source` that could not be fetched."""
    return ConfigError(
        f"{key}: {source!r} is not a folder, and fetching it from the hub failed ({reason}); "
        f"{_remedy(source, key)}{cwd_note(source)}"
    )


def _download(name: str, revision: str | None, patterns: Sequence[str], cached: bool) -> str:
    """Download the files of a repository that match `patterns`; return their folder. With `cached`, use only the cache.

    Raise the errors of the hub client.
    """
    from huggingface_hub import snapshot_download

    return str(
        snapshot_download(
            name,
            revision=revision,
            allow_patterns=list(patterns),
            ignore_patterns=list(_SUBFOLDERS),
            local_files_only=cached,
        )
    )
