"""Model families: config.json to ModelSpec and, for those that can be trained, back. One module each, listed here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, fields, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from kumi.errors import ModelError
from kumi.files.untrusted import brief, read_object
from kumi.spec.families import (
    bloom,
    bounds,
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
    keys,
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
    quantised,
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
from kumi.spec.families.nearest import difference
from kumi.spec.ledger import num_params
from kumi.spec.model import MLP, Attention, LatentAttention, LayerSpec, Mamba, ModelSpec, MoE, Rope

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

# The fields that the trainer reads; a model in which another one has been set is not a model that it computes.
_COMPUTED = {
    ModelSpec: "family vocab_size hidden_size layers norm_eps max_position_embeddings tie_word_embeddings "
               "initializer_range bos_token_id eos_token_id pad_token_id notes weights lora norm norm_bias "
               "zero_centered_norm learned_positions embedding_norm embedding_scale residual_scale logit_scale "
               "logit_softcap carried_config",
    LayerSpec: "attention mlp parallel shared_norm post_norms pre_norms",
    Attention: "num_attention_heads num_key_value_heads head_dim rope qkv_bias out_bias qk_norm qk_norm_whole "
               "sliding_window sinks alibi alibi_stepped score_scale softcap",
    LatentAttention: "num_attention_heads q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim rope "
                     "bias rope_interleave mscale_all_dim",
    Mamba: "num_heads head_dim state_size n_groups conv_kernel chunk_size conv_bias bias time_step_limit",
    MLP: "intermediate_size bias hidden_act gated",
    MoE: "num_experts num_experts_per_tok moe_intermediate_size shared_intermediate_size scoring_func n_group "
         "topk_group norm_topk_prob routed_scaling_factor topk_method router_aux_loss_coef seq_aux bias hidden_act "
         "gated act_limit act_alpha shared_gate",
    Rope: "rope_theta scaling factor original_max_position_embeddings low_freq_factor high_freq_factor beta_fast "
          "beta_slow attention_factor truncate partial_rotary_factor short_factor long_factor interleave "
          "query_growth",
}  # fmt: skip


def from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """The model that a config.json describes; what kumi does not understand in it is a ModelError."""
    _check_names(config)
    quantisation, config = quantised.method(config), _renamed(quantised.plain(config))
    family = _family(config)
    # Before a reader touches a value, all are of the right type and within their bounds.
    keys.check_types(family, config, getattr(FAMILIES[family], "KEYS", {}) | keys.TABLES)
    spec: ModelSpec = FAMILIES[family].from_hf(config)
    bounds.check_model(num_params(spec))
    return spec if quantisation is None else replace(spec, notes=(*spec.notes, quantised.note(quantisation)))


def check_trained(spec: ModelSpec) -> None:
    """Nothing, when the trainer computes exactly the model `spec`; ModelError when it can only be planned for."""
    ways = f"this version trains {', '.join(FAMILIES)}"
    if spec.family not in FAMILIES:
        raise ModelError(f"a {spec.family} model can be planned for but not trained: {ways}; plan it, or name a model "
                         f"of these families")  # fmt: skip
    parts = [spec, *(part for layer in spec.layer_kinds()[0] for part in _parts(layer))]
    for part in parts:
        unknown = _not_computed(part)
        if unknown:
            raise ModelError(f"this {spec.family} model can be planned for but not trained: its {unknown} is not "
                             f"computed; leave it out, or plan it only")  # fmt: skip


def _parts(layer: LayerSpec) -> tuple[object, ...]:
    rope = None if layer.attends is None else layer.attends.rope
    return tuple(part for part in (layer, layer.attention, layer.mlp, rope) if part is not None)


def _not_computed(part: Any) -> str:
    """What the trainer does not know of `part`: its type, or the first such field that has been set; else empty."""
    if type(part) not in _COMPUTED:
        return type(part).__name__
    known = _COMPUTED[type(part)].split()
    changed = [field.name for field in fields(part) if field.name not in known and _is_set(part, field)]
    return f"{type(part).__name__}.{changed[0]}={getattr(part, changed[0])!r}" if changed else ""


def _is_set(part: Any, field: Field[Any]) -> bool:
    return bool(getattr(part, field.name) != field.default)


def to_hf(spec: ModelSpec) -> dict[str, Any]:
    """The config.json of `spec`, in the spelling that transformers 4 and 5 both read."""
    check_trained(spec)
    config: dict[str, Any] = FAMILIES[spec.family].to_hf(spec)
    if from_hf(config) != spec:
        raise ModelError(f"this model cannot be written as a {spec.family} config.json: that format has no words for "
                         f"all of it (layers that differ, biases or norms the family does not have)")  # fmt: skip
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


def load(folder: str | Path) -> ModelSpec:
    """The model that the config.json in `folder` (or the file `folder`) describes."""
    return from_hf(read_config(folder))


def _check_names(config: Mapping[str, Any]) -> None:
    """Raise ModelError unless the names that `config` gives the model have the types of names."""
    architectures, model_type = config.get("architectures"), config.get("model_type")
    names = architectures if isinstance(architectures, list) else [architectures]
    for name in (model_type, *names[:100]):
        if name is not None and (not isinstance(name, str) or len(name) > 200):
            raise ModelError(f"config.json: architectures={brief(architectures)} with model_type={brief(model_type)}: "
                             f"{brief(name)} is no name of a model; correct it")  # fmt: skip


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
    raise ModelError(f"config.json: architectures={brief(architectures)} with model_type={brief(model_type)} is not "
                     f"supported: {difference(config, FAMILIES)}; docs/models.md lists the {len(FAMILIES)} families "
                     f"that kumi knows")  # fmt: skip
