"""Files of a repository on the hub, at one commit, in the hub client's cache."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kumi.errors import ConfigError, ModelError
from kumi.files.untrusted import INDEX, brief, read_object
from kumi.hub import reach
from kumi.paths import from_where

_ID = re.compile(r"([\w-][\w.-]*/[\w-][\w.-]*)(?:@([\w][\w./-]*))?")

# What is taken of a repository besides weights: configurations, tokenizers, and the card for its licence.
_SMALL = ("*.json", "*.jinja", "*.model", "*.txt", "README.md")
# Folders inside hold the same weights in other formats, or of another model.
_ELSEWHERE = ("*/*",)
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


@dataclass(frozen=True)
class Snapshot:
    """The repository `name` as of `commit`, in `folder` on this machine; `revision` is what was asked for."""

    folder: Path
    name: str
    revision: str | None
    commit: str


def is_id(source: str) -> bool:
    """Whether `source` is written as an id on the hub is, with or without a revision; a folder may be, too."""
    return _ID.fullmatch(source) is not None


def split(source: str) -> tuple[str, str | None] | None:
    """The repository and the revision, if any, that `source` names; None where it is not written as an id."""
    match = _ID.fullmatch(source)
    return None if match is None else (match[1], match[2])


def fetch(source: str, key: str, *, commit: str | None = None, weights: bool = False) -> Snapshot:
    """Everything of the repository `source`, the value of `key`, but its weights, which come with `weights`.

    With `commit` that state of it is taken instead of the newest. Where the hub cannot be reached, or HF_HUB_OFFLINE
    forbids to ask it, what the local cache holds is used. ConfigError when nothing comes of it.
    """
    name, revision = _parsed(source, key)

    def get(cached: bool) -> str:
        return _download(name, commit or revision, _SMALL, cached)

    folder = Path(_from_hub(source, key, get))
    found = Snapshot(folder, name, revision, folder.name)
    if weights:
        fetch_weights(found)
    return found


def fetch_weights(snapshot: Snapshot) -> None:
    """Make sure that the safetensors files of `snapshot` are in its folder; ModelError when there are none."""
    wanted = _weight_files(snapshot)
    if not all((snapshot.folder / file).is_file() for file in wanted):
        away = reach.out_of_reach()
        try:
            _download(snapshot.name, snapshot.commit, wanted, bool(away))
        except Exception as error:  # of many kinds, as in `_from_hub`
            said = away or reach.meaning(error, snapshot.name, snapshot.revision)
            raise ConfigError(
                f"{snapshot.name}: the hub did not give its weights ({said}); what came is kept, and "
                f"the same command goes on from there"
            ) from None
    missing = [file for file in wanted if not (snapshot.folder / file).is_file()]
    if missing:
        raise ModelError(
            f"{snapshot.name}: {missing[0]} is not in the repository at commit {snapshot.commit[:12]}, or "
            f"not in the local cache; kumi fetches no pickled weights (.bin): store them as safetensors "
            f"with transformers' save_pretrained"
        )


def fetch_config(source: str, key: str) -> Path:
    """The config.json of the repository `source`, the value of `key`; nothing else is fetched."""
    name, revision = _parsed(source, key)

    def get(cached: bool) -> str:
        from huggingface_hub import hf_hub_download

        return str(hf_hub_download(name, "config.json", revision=revision, local_files_only=cached))

    return Path(_from_hub(source, key, get))


def _weight_files(snapshot: Snapshot) -> list[str]:
    """The weight files that `snapshot` has by its index, or the one that a model without an index has."""
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
                f"{index}: names {brief(file)} as a file of weights; kumi takes safetensors files that "
                f"lie beside the index"
            )
    if not files:
        raise ModelError(f"{index}: names no files; name another revision")
    return files


def _parsed(source: str, key: str) -> tuple[str, str | None]:
    found = split(source)
    if found is None:
        raise ConfigError(
            f"{key}: {source!r} is no folder and no hub id; name a folder that holds {_holds(key)}{from_where(source)}"
        )
    return found


def _holds(key: str) -> str:
    return "tokenizer.json" if key == "data.tokenizer" else "config.json"


def _from_hub(source: str, key: str, get: Callable[[bool], str]) -> str:
    """What `get` gets from the hub for `source`, the value of `key`, or only from what was fetched of it before."""
    name, revision = _parsed(source, key)
    away = reach.out_of_reach()
    try:
        return get(bool(away))
    except Exception as error:  # the hub client raises many kinds, all of which mean the same here
        said = away or reach.meaning(error, name, revision)
        raise ConfigError(
            f"{key}: {source!r} is no folder, and the hub did not give it ({said}); name a folder that holds "
            f"{_holds(key)}{from_where(source)}"
        ) from None


def _download(name: str, revision: str | None, wanted: Sequence[str], cached: bool) -> str:
    from huggingface_hub import snapshot_download

    return str(
        snapshot_download(
            name,
            revision=revision,
            allow_patterns=list(wanted),
            ignore_patterns=list(_ELSEWHERE),
            local_files_only=cached,
        )
    )
