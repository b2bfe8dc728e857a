"""Where a model is: a folder, a config.json, or a repository on the hub."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kumi import hub
from kumi.config.schema import ModelSection, PlanConfig
from kumi.config.stored_config import run_folder
from kumi.errors import ModelError
from kumi.paths import looked_for
from kumi.spec.families import read_config


def model_folder(source: str, key: str) -> Path:
    """The local folder of a model or tokenizer: `source`, the value of `key`, itself, the one that its file `source`
    lies in, or the hub's copy of it, without its weights."""
    found = snapshot(source, key)
    return local_folder(source) if found is None else found.folder


def local_folder(source: str) -> Path:
    """The folder `source`, or the one that the file `source` lies in."""
    path = Path(os.path.expanduser(source))
    return path.parent if path.is_file() else path


def snapshot(source: str, key: str, out: Path | None = None) -> hub.Snapshot | None:
    """The hub's copy of `source`, the value of `key`, without its weights; None where `source` is a file or a folder.

    A run that has begun in the folder `out` gets the commit that it began from.
    """
    if Path(os.path.expanduser(source)).exists():
        return None
    return hub.fetch(source, key, commit=None if out is None else hub.recorded(out, key, source))


def hub_sources(config: PlanConfig) -> dict[str, str]:
    """Return the keys of `config` that may name a repository on the hub, with what they name."""
    sources = {"model.source": config.model.source, "data.tokenizer": config.data and config.data.tokenizer}
    return {key: source for key, source in sources.items() if isinstance(source, str)}


def fetch_snapshots(config: PlanConfig) -> dict[str, hub.Snapshot]:
    """Return the hub's copies, without weights, of the sources of `config` that are no local folder, by key."""
    out = run_folder(config)
    found = {key: snapshot(source, key, out) for key, source in hub_sources(config).items()}
    return {key: one for key, one in found.items() if one is not None}


def model_source(source: str | None, snapshots: Mapping[str, hub.Snapshot]) -> Path | None:
    """Return the folder of the model that `source`, the value of model.source, names; None where its config is
    inline."""
    if "model.source" in snapshots:
        return snapshots["model.source"].folder
    return None if source is None else local_folder(source)


def read_hf_config(section: ModelSection, folder: Path | None = None) -> dict[str, Any]:
    """The config.json of the model: inline, the file that `section` names, or that in `folder`, its local folder.

    Without `folder` it is found from `section` alone, and nothing else is fetched from the hub.
    """
    if section.source is None:
        return dict(section.config or {})
    file = Path(os.path.expanduser(section.source))
    if not file.is_file():
        folder = file if file.is_dir() else folder
        file = hub.fetch_config(section.source, "model.source") if folder is None else folder / "config.json"
    if not file.exists():
        raise ModelError(
            f"model.source: {looked_for(str(folder))} has no config.json; name a Hugging Face model folder"
        )
    return read_config(file)
