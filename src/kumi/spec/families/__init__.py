"""Model families: config.json to ModelSpec and, for those that can be trained, back. One module each, listed here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from kumi.errors import ModelError
from kumi.files.untrusted import brief, read_object
from kumi.spec.families import (
    bloom,
    cohere2,
    deepseek_v2,
    deepseek_v3,
    falcon,
    gemma1,
    gemma2,
    gemma3,
    gemma3_text,
    glm4,
    glm4_moe,
    gpt2,
    gpt_neox,
    gpt_oss,
    granite,
    kimi_k2,
    llama,
    ministral,
    ministral3,
    mistral,
    mistral3,
    mixtral,
    nemotron_h,
    nemotron_h_omni,
    olmo2,
    olmo3,
    olmoe,
    phi3,
    qwen2,
    qwen2_5_vl,
    qwen2_moe,
    qwen3,
    qwen3_moe,
    qwen3_vl,
    seed_oss,
    smollm3,
    starcoder2,
)
from kumi.spec.families._shared import bounds, config_keys, quantization
from kumi.spec.families._shared.nearest_family import difference
from kumi.spec.ledger import num_params
from kumi.spec.model import ModelSpec

# model_type -> module with ARCHITECTURE, from_hf(config) -> ModelSpec and to_hf(spec) -> config
FAMILIES: dict[str, ModuleType] = {
    "bloom": bloom,
    "cohere2": cohere2,
    "deepseek_v2": deepseek_v2,
    "deepseek_v3": deepseek_v3,
    "falcon": falcon,
    "gemma": gemma1,
    "gemma2": gemma2,
    "gemma3": gemma3,
    "gemma3_text": gemma3_text,
    "glm4": glm4,
    "glm4_moe": glm4_moe,
    "gpt2": gpt2,
    "gpt_neox": gpt_neox,
    "gpt_oss": gpt_oss,
    "granite": granite,
    "kimi_k2": kimi_k2,
    "llama": llama,
    "ministral": ministral,
    "ministral3": ministral3,
    "mistral": mistral,
    "mistral3": mistral3,
    "mixtral": mixtral,
    "nemotron_h": nemotron_h,
    "nemotron_h_omni": nemotron_h_omni,
    "olmo2": olmo2,
    "olmo3": olmo3,
    "olmoe": olmoe,
    "phi3": phi3,
    "qwen2": qwen2,
    "qwen2_5_vl": qwen2_5_vl,
    "qwen2_moe": qwen2_moe,
    "qwen3": qwen3,
    "qwen3_moe": qwen3_moe,
    "qwen3_vl": qwen3_vl,
    "seed_oss": seed_oss,
    "smollm3": smollm3,
    "starcoder2": starcoder2,
}

# What architectures were called before the first release of transformers that had them.
_OLD_NAMES = {"LLaMAForCausalLM": ["LlamaForCausalLM"]}


def from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """The model that a config.json describes; what kumi does not understand in it is a ModelError."""
    _check_names(config)
    quantisation, config = quantization.method(config), _renamed(quantization.plain(config))
    family = _family(config)
    # Before a reader touches a value, all are of the right type and within their bounds.
    config_keys.check_types(family, config, getattr(FAMILIES[family], "KEYS", {}) | config_keys.TABLES)
    spec: ModelSpec = FAMILIES[family].from_hf(config)
    bounds.check_model(num_params(spec))
    return spec if quantisation is None else replace(spec, notes=(*spec.notes, quantization.note(quantisation)))


def check_trained(spec: ModelSpec) -> None:
    """Raise ModelError unless the trainer computes the family of `spec`; one that it does not can be planned for."""
    if spec.family not in FAMILIES:
        raise ModelError(
            f"a {spec.family} model can be planned for but not trained: this version trains "
            f"{', '.join(FAMILIES)}; plan it, or name a model of these families"
        )


def to_hf(spec: ModelSpec) -> dict[str, Any]:
    """The config.json of `spec`, in the spelling that transformers 4 and 5 both read."""
    check_trained(spec)
    config: dict[str, Any] = FAMILIES[spec.family].to_hf(spec)
    if from_hf(config) != spec:
        raise ModelError(
            f"this model cannot be written as a {spec.family} config.json: that format has no words for "
            f"all of it (layers that differ, biases or norms the family does not have)"
        )
    return config


def patched(base: Mapping[str, Any], spec: ModelSpec) -> dict[str, Any]:
    """`base`, a config.json, with only those keys changed that must change to describe `spec`."""
    new, old = to_hf(spec), to_hf(from_hf(base))
    if "text_config" not in new:
        return _changed(base, new, old)
    # A model that sees has its text in a table of its own, or, as older ones do, beside the rest.
    inner, before = new.pop("text_config"), old.pop("text_config")
    config = _changed(base, new, old)
    if "text_config" in base:
        return config | {"text_config": _changed(base["text_config"], inner, before)}
    return _changed(config, inner, before)


def _changed(base: Mapping[str, Any], new: Mapping[str, Any], old: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with what is another in `new` than in `old`."""
    config = dict(base)
    changes = {key: value for key, value in new.items() if key not in old or old[key] != value}
    if "rope_theta" in changes or "rope_scaling" in changes:
        config.pop("rope_parameters", None)
        changes |= {key: new[key] for key in ("rope_theta", "rope_scaling")}
    return config | changes


def read_config(folder: str | Path) -> dict[str, Any]:
    """The config.json of `folder`, or of the file `folder` itself."""
    path = Path(folder)
    path = path / "config.json" if path.is_dir() else path
    # Configurations written by Python have Infinity where a limit is none; `keys.read` knows where that may be.
    return read_object(path.parent, path.name, infinity=True)


def _check_names(config: Mapping[str, Any]) -> None:
    """Raise ModelError unless the names that `config` gives the model have the types of names."""
    architectures, model_type = config.get("architectures"), config.get("model_type")
    names = architectures if isinstance(architectures, list) else [architectures]
    for name in (model_type, *names[:100]):
        if name is not None and (not isinstance(name, str) or len(name) > 200):
            raise ModelError(
                f"config.json: architectures={brief(architectures)} with model_type={brief(model_type)}: "
                f"{brief(name)} is no name of a model; correct it"
            )


def _renamed(config: dict[str, Any]) -> dict[str, Any]:
    """Return `config` with the architecture under the name that it has today."""
    names: Any = config.get("architectures")
    return config | {"architectures": _OLD_NAMES[names[0]]} if names in ([old] for old in _OLD_NAMES) else config


def _family(config: Mapping[str, Any]) -> str:
    architectures: Any = config.get("architectures")
    model_type: Any = config.get("model_type")
    if architectures is None and model_type in FAMILIES:
        return str(model_type)
    # An architecture may go by several names: the first is its own.
    names = [name for name, module in FAMILIES.items() if architectures == [module.ARCHITECTURE]]
    if names and model_type in (*names, None):
        return str(model_type or names[0])
    raise ModelError(
        f"config.json: architectures={brief(architectures)} with model_type={brief(model_type)} is not "
        f"supported: {difference(config, FAMILIES)}; docs/models.md lists the {len(FAMILIES)} families "
        f"that kumi knows"
    )
