"""Download source models from the hub, and upload exported folders to it."""

from __future__ import annotations

import os
from pathlib import Path

from kumi import hub
from kumi.convert.hf.card import check_verified
from kumi.errors import RefusedError
from kumi.paths import shown_path
from kumi.remote.addresses import is_url
from kumi.storage.run_download import fetch_model


def model_folder_of(source: str | Path, key: str, checkpoint: str | int | None = None) -> Path:
    """Return the path `source`; or, if it is a URL, or does not exist and is a hub id, the folder of the download.

    `key` is the name of `source` on the command line. Of a run at a URL, the download has the checkpoint of the step
    `checkpoint`, beside the best one and the last. Raise ConfigError if the download fails.
    """
    if isinstance(source, str) and is_url(source):
        step = None if checkpoint is None or not str(checkpoint).isdecimal() else int(checkpoint)
        return fetch_model(source, key, step)
    path = Path(os.path.expanduser(source))
    return path if path.exists() or not hub.is_id(str(source)) else hub.fetch(str(source), key, weights=True).folder


def publish(folder: str | Path, name: str, *, public: bool = False, unverified: bool = False) -> str:
    """Upload the files of `folder` to the repository `name`; return its address.

    Raise RefusedError unless the folder holds a model or adapters, verified and unchanged since (unless `unverified`).
    """
    folder = Path(folder)
    if not any((folder / name).is_file() for name in ("config.json", "adapter_config.json")):
        raise RefusedError(
            f"{shown_path(folder)}: holds neither a Hugging Face model (config.json) nor adapters "
            f"(adapter_config.json); write one with kumi convert --to hf"
        )
    hub.check_push(name, "--push")
    if not unverified:
        check_verified(folder)
    return hub.push(folder, name, public=public)
