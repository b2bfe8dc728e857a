"""Where a model is: a folder, a config.json, or a repository on the hub."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from kumi import hub
from kumi.config.schema import ModelSection
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
