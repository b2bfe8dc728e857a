"""Where a model is: a folder, a config.json, or a repository on the hub."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kumi.config.schema import ModelSection
from kumi.errors import ConfigError, ModelError

# Seconds that the hub has to answer at all.
REACHED = 5.0


def model_folder(source: str, key: str) -> Path:
    """The local folder of a model or tokenizer: `source`, the value of `key`, itself, the one that its file `source`
    lies in, or the hub's copy of it."""
    path = Path(os.path.expanduser(source))
    if path.is_file():
        return path.parent
    return path if path.is_dir() else Path(_from_hub(source, key, _snapshot))


def read_hf_config(section: ModelSection, folder: Path | None = None) -> dict[str, Any]:
    """The config.json of the model: inline, the file that `section` names, or that in `folder`, its local folder.

    Without `folder` it is found from `section` alone, and nothing else is fetched from the hub.
    """
    if section.source is None:
        return dict(section.config or {})
    file = Path(os.path.expanduser(section.source))
    if not file.is_file():
        folder = file if file.is_dir() else folder
        file = (
            Path(_from_hub(section.source, "model.source", _config_only)) if folder is None else folder / "config.json"
        )
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"model.source: {folder} has no config.json; name a Hugging Face model folder") from None
    except OSError as error:
        raise ModelError(f"{file}: cannot be read ({error.strerror}); name a Hugging Face model folder") from None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{file}: not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise ModelError(f"{file}: holds a {type(found).__name__}, not an object")
    return found


def _from_hub(source: str, key: str, fetch: Callable[[str, bool], str]) -> str:
    """What `fetch` gets from the hub for `source`, the value of `key`, or only from what was fetched of it before."""
    wanted = "config.json" if key == "model.source" else "tokenizer.json"
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", source):
        raise ConfigError(f"{key}: {source!r} is no folder and no hub id; name a folder that holds {wanted}")
    away = _out_of_reach()
    try:
        return fetch(source, bool(away))
    except Exception as error:  # the hub client raises many kinds, all of which mean the same here
        said = away or _in_a_line(error)
        raise ConfigError(
            f"{key}: {source!r} is no folder, and the hub did not give it ({said}); name a folder that holds {wanted}"
        ) from None


def _out_of_reach() -> str:
    """Why the hub cannot be reached, empty where it can: found out in one try, where fetching would make six."""
    try:
        from huggingface_hub import constants, get_session

        get_session().head(constants.ENDPOINT, timeout=REACHED)
    except Exception as error:  # of many kinds, as above
        return _in_a_line(error)
    return ""


def _in_a_line(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


def _snapshot(source: str, cached: bool) -> str:
    from huggingface_hub import snapshot_download

    wanted = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
    return str(snapshot_download(source, allow_patterns=wanted, local_files_only=cached))


def _config_only(source: str, cached: bool) -> str:
    from huggingface_hub import hf_hub_download

    return str(hf_hub_download(source, "config.json", local_files_only=cached))
