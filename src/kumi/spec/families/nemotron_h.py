"""Nemotron-H and Nemotron 3 (arXiv:2504.03624, arXiv:2512.20848): each layer has one norm and one of: Mamba-2
mixer, attention, dense MLP, experts. There are no position embeddings.

As in transformers, time steps are at least `time_step_min`, and `time_step_limit` has no effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Any

from kumi.errors import ModelError
from kumi.spec.families._shared import experts
from kumi.spec.families._shared.config_keys import ROUTER_KEYS, Key, checked_activation, read, require_values
from kumi.spec.families._shared.decoder_config import build_model, check_sizes, grouped_attention
from kumi.spec.model import MLP, Attention, LayerSpec, Mamba, ModelSpec, MoE
from kumi.spec.weight_rules import Rename, Rows, Stack, Weights

ARCHITECTURE = "NemotronHForCausalLM"
# Current and old names of layer types in transformers -> letters in a pattern.
_LAYER_LETTERS = {
    "linear_attention": "M",
    "mamba": "M",
    "full_attention": "*",
    "attention": "*",
    "mlp": "-",
    "moe": "E",
}
# Keys of config.json -> fields of `Mamba`.
_MAMBA_FIELDS = {
    "mamba_num_heads": "num_heads",
    "mamba_head_dim": "head_dim",
    "ssm_state_size": "state_size",
    "n_groups": "n_groups",
    "conv_kernel": "conv_kernel",
    "chunk_size": "chunk_size",
    "use_conv_bias": "conv_bias",
    "use_bias": "bias",
}
# Keys of config.json that are fields of `MoE` with the same names.
_MOE_FIELDS = (
    "num_experts_per_tok",
    "moe_intermediate_size",
    "routed_scaling_factor",
    "n_group",
    "topk_group",
    "norm_topk_prob",
)
KEYS = {
    **ROUTER_KEYS,
    "vocab_size": Key("integer"),
    "hidden_size": Key("integer"),
    "hybrid_override_pattern": Key("text or null", None),
    "layers_block_type": Key("list or null", None),
    "num_hidden_layers": Key("integer or null", None),
    "layer_norm_epsilon": Key("number", 1e-5),
    "max_position_embeddings": Key("integer", 4096),
    "initializer_range": Key("number", 0.02),
    "tie_word_embeddings": Key("true or false", False),
    "bos_token_id": Key("integer or null", 1),
    "eos_token_id": Key("integer or list of integers or null", 2),
    "pad_token_id": Key("integer or null", 0),
    "num_attention_heads": Key("integer", 32),
    "num_key_value_heads": Key("integer or null", 8),
    "head_dim": Key("integer", 128),
    "attention_head_dim": Key("integer or null", None),
    "attention_bias": Key("true or false", False),
    "sliding_window": Key("integer or null", None),
    "intermediate_size": Key("integer", 21504),
    "mlp_hidden_act": Key("text", "relu2"),
    "mlp_bias": Key("true or false", False),
    "mamba_num_heads": Key("integer", 128),
    "mamba_head_dim": Key("integer", 64),
    "mamba_hidden_act": Key("text", "silu"),
    "mamba_proj_bias": Key("true or false", False),
    "ssm_state_size": Key("integer", 128),
    "n_groups": Key("integer", 8),
    "conv_kernel": Key("integer", 4),
    "chunk_size": Key("integer", 128),
    "use_conv_bias": Key("true or false", True),
    "use_bias": Key("true or false", False),
    "time_step_min": Key("number", 0.001),
    "n_routed_experts": Key("integer", 8),
    "num_experts_per_tok": Key("integer", 2),
    "moe_intermediate_size": Key("integer", 7688),
    "moe_shared_expert_intermediate_size": Key("integer", 7688),
    "n_shared_experts": Key("integer", 1),
    "moe_latent_size": Key("integer or null", None),
    "routed_scaling_factor": Key("number", 1.0),
    "n_group": Key("integer", 1),
    "topk_group": Key("integer", 1),
    "norm_topk_prob": Key("true or false", True),
    "num_nextn_predict_layers": Key("integer or null", None),
    # Without effect on the computation: initialization, runtime options, keys of other families.
    **dict.fromkeys(("time_step_max", "time_step_floor", "rms_norm_eps", "norm_eps", "rope_theta"), Key("number", 0)),
    **dict.fromkeys(("expand", "time_step_rank", "num_logits_to_keep"), Key("integer or null", None)),
    **dict.fromkeys(
        ("rescale_prenorm_residual", "use_mamba_kernels", "moe_shared_expert_overlap"), Key("true or false", True)
    ),
    **dict.fromkeys(("time_step_limit", "mtp_layers_block_type"), Key("list or null", None)),
    **dict.fromkeys(("mamba_ssm_cache_dtype", "mtp_hybrid_override_pattern"), Key("text or null", None)),
    "residual_in_fp32": Key("true or false", False),
    "hidden_dropout": Key("number", 0.0),
    "auto_map": Key("table or null", None),
}
# Rules for the format of this family's tensors in files (see `kumi.spec.weight_rules`): kumi's names come first.
WEIGHTS = Weights(
    (
        Rename("input_layernorm", "norm"),
        Rename("post_attention_layernorm", "norm"),
        Rows(tuple(f"mamba.{part}_proj" for part in ("z", "x", "b", "c", "dt")), "mixer.in_proj"),
        Rows(tuple(f"mamba.{part}_conv1d" for part in ("x", "b", "c")), "mixer.conv1d"),
        Stack("mlp.experts.up_proj", ("mixer.experts.{}.up_proj.weight",)),
        Stack("mlp.experts.down_proj", ("mixer.experts.{}.down_proj.weight",)),
        *(Rename(part, "mixer") for part in ("mamba", "self_attn", "mlp")),
    ),
    prefixes=(
        ("model.embed_tokens.", "backbone.embeddings."),
        ("model.norm.", "backbone.norm_f."),
        ("model.layers.", "backbone.layers."),
    ),
    base="backbone.",
)


def from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """Return the model that a config.json with model_type "nemotron_h" describes."""
    values = read("nemotron_h", config, KEYS)
    check_sizes(values)
    require_values(
        "nemotron_h",
        values,
        sliding_window=None,
        attention_bias=False,
        mamba_hidden_act="silu",
        mamba_proj_bias=False,
        residual_in_fp32=False,
        hidden_dropout=0,
    )
    if values["attention_head_dim"] not in (values["head_dim"], None):
        raise ModelError(
            f"config.json: attention_head_dim={values['attention_head_dim']} and head_dim="
            f"{values['head_dim']} of a nemotron_h model; give one of them"
        )
    if values["num_nextn_predict_layers"]:
        raise ModelError(
            f"config.json: num_nextn_predict_layers={values['num_nextn_predict_layers']} of a nemotron_h "
            f"model is not supported: kumi has no layers for multi-token prediction in it; set 0 to leave "
            f"them out"
        )
    pattern = _pattern(values)
    bias, act = values["mlp_bias"], checked_activation("nemotron_h", "mlp_hidden_act", values["mlp_hidden_act"])
    build = {
        "M": lambda: LayerSpec(_mamba(values), None),
        "*": lambda: LayerSpec(grouped_attention(values, None), None),
        "-": lambda: LayerSpec(None, MLP(values["intermediate_size"], bias, act, gated=False)),
        "E": lambda: LayerSpec(None, _experts(values, act)),
    }
    layers = {letter: build[letter]() for letter in set(pattern)}
    return build_model(
        "nemotron_h",
        values,
        [layers[letter] for letter in pattern],
        norm_eps=float(values["layer_norm_epsilon"]),
        weights=WEIGHTS,
    )


def to_hf(spec: ModelSpec) -> dict[str, Any]:
    """Return the config.json of `spec`, with its layers as a pattern and without the keys of absent layer types."""
    eos, kinds = spec.eos_token_id, spec.unique_layers()[0]
    written: dict[str, Any] = {
        "architectures": [ARCHITECTURE],
        "model_type": "nemotron_h",
        "hybrid_override_pattern": "".join(_letter(layer) for layer in spec.layers),
        "num_hidden_layers": spec.num_hidden_layers,
        "layer_norm_epsilon": spec.norm_eps,
        "eos_token_id": list(eos) if isinstance(eos, tuple) else eos,
        "use_cache": True,
    }
    same = (
        "vocab_size",
        "hidden_size",
        "max_position_embeddings",
        "initializer_range",
        "tie_word_embeddings",
        "bos_token_id",
        "pad_token_id",
    )
    written |= {name: getattr(spec, name) for name in same}
    for layer in kinds:
        written |= _part_keys(layer.attention) | _part_keys(layer.mlp)
    return written


def _pattern(values: Mapping[str, Any]) -> str:
    """Return the letters of the layers, from the list or the pattern; transformers prefers the list."""
    pattern, kinds, count = (
        values[name] for name in ("hybrid_override_pattern", "layers_block_type", "num_hidden_layers")
    )
    letters = pattern if kinds is None else "".join(_LAYER_LETTERS.get(str(kind), "?") for kind in kinds)
    if not letters or set(letters) - set(_LAYER_LETTERS.values()):
        raise ModelError(
            f"config.json: hybrid_override_pattern={pattern!r} and layers_block_type={kinds!r} of a "
            f"nemotron_h model; give one of them: a pattern of the letters M, *, - and E, or a list of "
            f"{', '.join(_LAYER_LETTERS)}"
        )
    if count not in (len(letters), None):
        raise ModelError(
            f"config.json: num_hidden_layers={count}, but {len(letters)} layer types are given; correct one of them"
        )
    return str(letters)


def _mamba(values: Mapping[str, Any]) -> Mamba:
    """Return the Mamba mixer that `values` describe."""
    heads, groups = values["mamba_num_heads"], values["n_groups"]
    if heads % groups:
        raise ModelError(f"config.json: n_groups={groups} does not divide mamba_num_heads={heads}; correct one of them")
    fields = {field: values[name] for name, field in _MAMBA_FIELDS.items()}
    return Mamba(**fields, time_step_limit=(float(values["time_step_min"]), inf))


def _experts(values: Mapping[str, Any], act: str) -> MoE:
    """Return the experts that `values` describe, with the activation function `act`."""
    require_values("nemotron_h", values, moe_latent_size=None, n_shared_experts=1, mlp_bias=False)
    return experts.checked_moe(
        MoE(
            values["n_routed_experts"],
            shared_intermediate_size=values["moe_shared_expert_intermediate_size"],
            scoring_func="sigmoid",
            topk_method="noaux_tc",
            hidden_act=act,
            gated=False,
            router_aux_loss_coef=experts.aux_loss_coef("nemotron_h", values, "router_aux_loss_coef", 0.0),
            **{name: values[name] for name in _MOE_FIELDS},
        )
    )


def _letter(layer: LayerSpec) -> str:
    """Return the letter of `layer` in a pattern."""
    part = layer.mlp if layer.attention is None else layer.attention
    return {Mamba: "M", Attention: "*", MLP: "-", MoE: "E"}.get(type(part), "?")


def _part_keys(part: object) -> dict[str, Any]:
    """Return the config.json keys that describe `part`, the mixer or the MLP of a layer."""
    if isinstance(part, Mamba):
        return {name: getattr(part, field) for name, field in _MAMBA_FIELDS.items()} | {
            "mamba_hidden_act": "silu",
            "time_step_min": part.time_step_limit[0],
        }
    if isinstance(part, Attention):
        return {name: getattr(part, name) for name in ("num_attention_heads", "num_key_value_heads", "head_dim")}
    if isinstance(part, MLP):
        return {"intermediate_size": part.intermediate_size, "mlp_bias": part.bias, "mlp_hidden_act": part.hidden_act}
    if isinstance(part, MoE):
        return {name: getattr(part, name) for name in _MOE_FIELDS} | {
            "n_routed_experts": part.num_experts,
            "n_shared_experts": 1,
            "moe_shared_expert_intermediate_size": part.shared_intermediate_size,
            "mlp_hidden_act": part.hidden_act,
            "router_aux_loss_coef": part.router_aux_loss_coef,
        }
    return {}
