"""Model families: config.json to ModelSpec and back. One module a family, listed here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from kumi.errors import ModelError
from kumi.spec.families import llama, mistral, qwen2, qwen3
from kumi.spec.model import ModelSpec

# model_type -> module with ARCHITECTURE, from_hf(config) -> ModelSpec and to_hf(spec) -> config
FAMILIES: dict[str, ModuleType] = {"llama": llama, "mistral": mistral, "qwen2": qwen2, "qwen3": qwen3}


def from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """The model that a config.json describes; what kumi does not understand in it is a ModelError."""
    spec: ModelSpec = FAMILIES[_family(config)].from_hf(config)
    return spec


def to_hf(spec: ModelSpec) -> dict[str, Any]:
    """The config.json of `spec`, in the spelling that transformers 4 and 5 both read."""
    config: dict[str, Any] = FAMILIES[spec.family].to_hf(spec)
    if from_hf(config) != spec:
        raise ModelError(f"this model cannot be written as a {spec.family} config.json: that format has no words for "
                         f"all of it (layers that differ, biases or norms the family does not have)")  # fmt: skip
    return config


def patched(base: Mapping[str, Any], spec: ModelSpec) -> dict[str, Any]:
    """`base`, a config.json, with only those keys changed that must change to describe `spec`."""
    new, old, config = to_hf(spec), to_hf(from_hf(base)), dict(base)
    changes = {key: value for key, value in new.items() if key not in old or old[key] != value}
    if "rope_theta" in changes or "rope_scaling" in changes:
        config.pop("rope_parameters", None)
        changes |= {key: new[key] for key in ("rope_theta", "rope_scaling")}
    return config | changes


def read_config(folder: str | Path) -> dict[str, Any]:
    """The config.json of `folder`, or of the file `folder` itself."""
    path = Path(folder)
    path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path} does not exist; a model folder has a config.json") from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelError(f"{path} is not valid JSON ({error}); fetch the file again") from None
    if not isinstance(config, dict):
        raise ModelError(f"{path} holds {type(config).__name__} instead of an object; fetch the file again")
    return config


def load(folder: str | Path) -> ModelSpec:
    """The model that the config.json in `folder` (or the file `folder`) describes."""
    return from_hf(read_config(folder))


def _family(config: Mapping[str, Any]) -> str:
    supported = {module.ARCHITECTURE: name for name, module in FAMILIES.items()}
    architectures: Any = config.get("architectures")
    model_type: Any = config.get("model_type")
    if architectures is None and model_type in FAMILIES:
        return str(model_type)
    known = isinstance(architectures, list) and len(architectures) == 1 and architectures[0] in supported
    if known and model_type in (supported[architectures[0]], None):
        return supported[architectures[0]]
    raise ModelError(f"config.json: architectures={architectures!r} with model_type={model_type!r} is not supported; "
                     f"kumi knows {', '.join(supported)}")  # fmt: skip
