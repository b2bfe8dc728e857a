"""The source of a model: a folder, a config.json, a URL of a folder, or a repository on the hub."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kumi import hub
from kumi.config.job_sections import ModelSection
from kumi.config.reward_section import model_rewards
from kumi.config.schema import PlanConfig
from kumi.config.stored_config import run_folder
from kumi.errors import ModelError
from kumi.paths import shown_path
from kumi.remote.addresses import is_url, url_name
from kumi.spec.families import read_config


def model_folder(source: str, key: str) -> Path:
    """Return the local folder of a model or tokenizer, given `source`, the value of `key`.

    It is the folder `source`, the folder of the file `source`, or the hub's snapshot of `source`, without weights.
    """
    snapshot = fetch_snapshot(source, key)
    return local_folder(source) if snapshot is None else snapshot.folder


def local_folder(source: str) -> Path:
    """Return the folder `source`, or the folder of the file `source`; of a URL the local copy without weights."""
    if is_url(source):
        return _fetch_small(source)
    path = Path(os.path.expanduser(source))
    return path.parent if path.is_file() else path


@functools.cache
def _fetch_small(url: str) -> Path:
    """Fetch the files of a model's folder at `url`, without weights, and return the local folder."""
    from kumi.remote.fetched_files import fetch_folder  # imported here: it takes 25 ms, and only URLs need it

    return fetch_folder(url, "model", lambda name: "/" not in name and name.endswith(hub.SMALL_SUFFIXES))


def fetch_url_weights(source: str | None) -> None:
    """Fetch all files of the model `source` if it is a URL, to the folder that `local_folder` returns."""
    if source is not None and is_url(source):
        from kumi.remote.fetched_files import fetch_folder

        fetch_folder(source, "model", lambda name: "/" not in name)


def model_name(section: ModelSection) -> str:
    """Return the model's name: the name of its local folder, or its hub id; "" for an inline config."""
    source = section.source
    if source is not None and is_url(source):
        return url_name(source)
    if source is None or not Path(os.path.expanduser(source)).exists():
        return source or ""
    return local_folder(source).resolve().name


def fetch_snapshot(source: str, key: str, out: Path | None = None) -> hub.Snapshot | None:
    """Return the hub's snapshot of `source`, the value of `key`, without weights; None if `source` is a local path.

    A run that has started in the folder `out` gets the commit of its first start.
    """
    if is_url(source) or Path(os.path.expanduser(source)).exists():
        return None
    return hub.fetch(source, key, commit=None if out is None else hub.recorded_commit(out, key, source))


def hub_sources(config: PlanConfig) -> dict[str, str]:
    """Return the values of the keys of `config` that may name a repository on the hub."""
    sources = {
        "model.source": config.model.source,
        "data.tokenizer": config.data and config.data.tokenizer,
        "reference.model": config.reference.model,
        **{key: reward.source for key, reward in model_rewards(config.rewards).items()},
        "critic.model": config.critic.model,
    }
    return {key: source for key, source in sources.items() if isinstance(source, str)}


def fetch_snapshots(config: PlanConfig) -> dict[str, hub.Snapshot]:
    """Return the snapshots, without weights, of the hub sources of `config`, by key."""
    out = run_folder(config)
    snapshots = {key: fetch_snapshot(source, key, out) for key, source in hub_sources(config).items()}
    return {key: snapshot for key, snapshot in snapshots.items() if snapshot is not None}


def source_folder(source: str | None, snapshots: Mapping[str, hub.Snapshot]) -> Path | None:
    """Return the folder of the model that `source`, the value of model.source, names; None for an inline config."""
    if "model.source" in snapshots:
        return snapshots["model.source"].folder
    return None if source is None else local_folder(source)


def read_hf_config(section: ModelSection, folder: Path | None = None) -> dict[str, Any]:
    """Return the config.json of the model: inline, the file that `section` names, or the file in its local `folder`.

    If a hub id has no local `folder`, fetch only config.json. Raise ModelError if the folder has no config.json.
    """
    if section.source is None:
        return dict(section.config or {})
    return read_source_config(section.source, "model.source", folder)


def read_source_config(source: str, key: str, folder: Path | None = None) -> dict[str, Any]:
    """Return the config.json of the model that `source`, the value of `key`, names; as `read_hf_config`."""
    file = local_folder(source) if is_url(source) else Path(os.path.expanduser(source))
    if not file.is_file():
        folder = file if file.is_dir() else folder
        file = hub.fetch_config(source, key) if folder is None else folder / "config.json"
    if not file.exists():
        raise ModelError(f"{key}: {shown_path(str(folder))} has no config.json; name a Hugging Face model folder")
    return read_config(file)
