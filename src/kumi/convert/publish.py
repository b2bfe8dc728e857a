"""Models from the hub and to it: what `kumi convert`, `kumi vocab` and `kumi push` name."""

from __future__ import annotations

import os
from pathlib import Path

from kumi import hub
from kumi.convert.card import check_verified
from kumi.errors import RefusedError
from kumi.paths import looked_for


def located(source: str | Path, key: str) -> Path:
    """The folder of the model `source`: itself where it exists, else the hub's copy of that repository with weights.

    `key` is what the command line calls it. ConfigError when it is neither.
    """
    path = Path(os.path.expanduser(source))
    return path if path.exists() or not hub.is_id(str(source)) else hub.fetch(str(source), key, weights=True).folder


def publish(folder: str | Path, name: str, *, public: bool = False, unverified: bool = False) -> str:
    """The address of the repository `name`, once it holds the files of `folder`.

    RefusedError when the folder holds neither a model nor adapters of one, or is not as it was when it was verified,
    unless `unverified`.
    """
    folder = Path(folder)
    if not any((folder / name).is_file() for name in ("config.json", "adapter_config.json")):
        raise RefusedError(
            f"{looked_for(folder)}: holds neither a Hugging Face model (config.json) nor adapters "
            f"(adapter_config.json); write one with kumi convert --to hf"
        )
    hub.check_push(name, "--push")
    if not unverified:
        check_verified(folder)
    return hub.push(folder, name, public=public)
