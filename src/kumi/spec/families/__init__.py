"""Model families: config.json to ModelSpec and back, with one module for each family; `FAMILIES` lists them."""

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
from kumi.spec.families._shared import bounds, classifiers, config_keys, quantization
from kumi.spec.families._shared.nearest_family import unsupported_reason
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

# Names of architectures before their first release in transformers -> their current names.
_OLD_NAMES = {"LLaMAForCausalLM": ["LlamaForCausalLM"]}


def from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """Return the model that a config.json describes; raise ModelError for keys or values that kumi does not support."""
    _check_names(config)
    method, config = (
        quantization.quantization_config(config),
        _with_current_architecture(quantization.without_quantization(config)),
    )
    classified = classifiers.classified_family(config)
    if classified is not None:
        config = {**config, "architectures": [FAMILIES[classified].ARCHITECTURE]}
    family = _family(config)
    # Check all types and bounds before a family reads values.
    config_keys.check_types(family, config, getattr(FAMILIES[family], "KEYS", {}) | config_keys.TABLE_KEYS)
    spec: ModelSpec = FAMILIES[family].from_hf(config)
    if classified is not None:
        spec = replace(spec, head="score", tie_word_embeddings=False)
    bounds.check_num_params(num_params(spec))
    return spec if method is None else replace(spec, notes=(*spec.notes, quantization.quantization_note(method)))


def with_score_head(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json `config` as that of a reward model: the sequence classifier of its family with one label.

    A reward model's own `config` is returned unchanged. Raise ModelError if transformers has no sequence classifier of
    the family.
    """
    _check_names(config)
    if classifiers.classified_family(config) is not None:
        return dict(config)
    return classifiers.classifier_config(config, _family(_with_current_architecture(dict(config))))


def architecture(spec: ModelSpec) -> str:
    """Return the name of the class of `spec` in transformers."""
    return classifiers.CLASSIFIERS[spec.family] if spec.head == "score" else str(FAMILIES[spec.family].ARCHITECTURE)


def check_trainable(spec: ModelSpec) -> None:
    """Raise ModelError unless kumi can train the family of `spec`; other models can only be planned."""
    if spec.family not in FAMILIES:
        raise ModelError(
            f"a {spec.family} model can be planned for but not trained: this version trains "
            f"{', '.join(FAMILIES)}; plan it, or name a model of these families"
        )


def to_hf(spec: ModelSpec) -> dict[str, Any]:
    """Return the config.json of `spec`, in the spelling that transformers 4 and 5 both read.

    Raise ModelError if the family of `spec`, or its config.json, cannot express the model.
    """
    check_trainable(spec)
    config: dict[str, Any] = FAMILIES[spec.family].to_hf(spec)
    config = config if spec.head == "lm" else classifiers.classifier_config(config, spec.family)
    if from_hf(config) != spec:
        raise ModelError(
            f"this model cannot be written as a {spec.family} config.json: that format cannot express "
            f"all of it (layers that differ, biases or norms that the family lacks); change the model"
        )
    return config


def patch_config(base: Mapping[str, Any], spec: ModelSpec) -> dict[str, Any]:
    """Return the config.json `base`, changed only in the keys that must change to describe `spec`.

    `architectures` is added if it is missing: vLLM, SGLang and llama.cpp select the model by it, not by `model_type`.
    """
    new, old = to_hf(spec), to_hf(from_hf(base))
    base = base if base.get("architectures") else {**base, "architectures": [architecture(spec)]}
    if "text_config" not in new:
        return _changed(base, new, old)
    # Vision-language models have the text model in text_config or, in older configs, at the top level.
    inner, before = new.pop("text_config"), old.pop("text_config")
    config = _changed(base, new, old)
    if "text_config" in base:
        return config | {"text_config": _changed(base["text_config"], inner, before)}
    return _changed(config, inner, before)


def _changed(base: Mapping[str, Any], new: Mapping[str, Any], old: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` with the values of `new` for the keys that differ between `new` and `old`."""
    config = dict(base)
    changes = {key: value for key, value in new.items() if key not in old or old[key] != value}
    if "rope_theta" in changes or "rope_scaling" in changes:
        config.pop("rope_parameters", None)
        changes |= {key: new[key] for key in ("rope_theta", "rope_scaling")}
    return config | changes


def read_config(folder: str | Path) -> dict[str, Any]:
    """Return the config.json in `folder`, or the content of `folder` if it is a file."""
    path = Path(folder)
    path = path / "config.json" if path.is_dir() else path
    # Python writes Infinity for an absent limit; `config_keys.read` checks where it is allowed.
    return read_object(path.parent, path.name, infinity=True)


def _check_names(config: Mapping[str, Any]) -> None:
    """Raise ModelError unless the names that `config` gives the model have the types of names."""
    architectures, model_type = config.get("architectures"), config.get("model_type")
    names = architectures if isinstance(architectures, list) else [architectures]
    for name in (model_type, *names[:100]):
        if name is not None and (not isinstance(name, str) or len(name) > 200):
            raise ModelError(
                f"config.json: architectures={brief(architectures)} with model_type={brief(model_type)}: "
                f"{brief(name)} is not a valid model name; correct it"
            )


def _with_current_architecture(config: dict[str, Any]) -> dict[str, Any]:
    """Return `config` with the current name of its architecture."""
    names: Any = config.get("architectures")
    return config | {"architectures": _OLD_NAMES[names[0]]} if names in ([old] for old in _OLD_NAMES) else config


def _family(config: Mapping[str, Any]) -> str:
    """Return the key of `FAMILIES` for `config`; raise ModelError if no family fits."""
    architectures: Any = config.get("architectures")
    model_type: Any = config.get("model_type")
    if architectures is None and model_type in FAMILIES:
        return str(model_type)
    # Several model types may share an architecture: the first is the default.
    names = [name for name, module in FAMILIES.items() if architectures == [module.ARCHITECTURE]]
    if names and model_type in (*names, None):
        return str(model_type or names[0])
    raise ModelError(
        f"config.json: architectures={brief(architectures)} with model_type={brief(model_type)} is not "
        f"supported: {unsupported_reason(config, FAMILIES)}; docs/models.md lists the {len(FAMILIES)} supported "
        f"families"
    )
