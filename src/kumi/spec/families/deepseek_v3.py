"""DeepSeek-V3 and R1 (arXiv:2412.19437).

Multi-token-prediction layers are passthrough tensors: not trained, and copied from the model's files into its exports.
`Weights.passthrough` has one prefix of names for each of these layers.

The router's load-balancing bias is a buffer: the optimizer does not update it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kumi.errors import ModelError
from kumi.spec.families._shared.config_keys import Key, read, require_values
from kumi.spec.families._shared.decoder_config import mtp_fields
from kumi.spec.families._shared.deepseek_layers import LATENT_KEYS, build_deepseek, deepseek_to_hf
from kumi.spec.model import LatentAttention, ModelSpec

ARCHITECTURE = "DeepseekV3ForCausalLM"
KEYS = {
    **LATENT_KEYS,
    "max_position_embeddings": Key("integer", 4_096),
    "n_shared_experts": Key("integer or null", 1),
    "n_group": Key("integer or null", 8),
    "topk_group": Key("integer or null", 4),
    "first_k_dense_replace": Key("integer", 3),
    "bos_token_id": Key("integer or null", 0),
    "eos_token_id": Key("integer or list of integers or null", 1),
    "scoring_func": Key("text", "sigmoid"),
    "topk_method": Key("text", "noaux_tc"),
    "norm_topk_prob": Key("true or false", True),
    "routed_scaling_factor": Key("number", 2.5),
    "num_nextn_predict_layers": Key("integer or null", None),
    "rope_interleave": Key("true or false", True),
    "rms_norm_eps": Key("number", 1e-6),
}


def from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """Return the model that a config.json with model_type "deepseek_v3" describes."""
    return deepseek_v3_from_hf("deepseek_v3", config)


def deepseek_v3_from_hf(family: str, config: Mapping[str, Any]) -> ModelSpec:
    """Return the model that `config` describes: a config.json with the model_type `family` and DeepSeek-V3's keys."""
    values = read(family, config, KEYS)
    require_values(family, values, scoring_func="sigmoid", topk_method="noaux_tc")
    extra = values["num_nextn_predict_layers"] or 0
    if extra < 0:
        raise ModelError(f"config.json: num_nextn_predict_layers={extra} must not be negative; correct it")
    spec = build_deepseek(family, values, scoring="sigmoid", interleave=values["rope_interleave"])
    return replace(spec, **mtp_fields(spec.weights, spec.num_hidden_layers, extra))


def to_hf(spec: ModelSpec) -> dict[str, Any]:
    """Return the config.json of `spec`."""
    attention = spec.layers[0].attention
    interleave = isinstance(attention, LatentAttention) and attention.rope_interleave
    return deepseek_to_hf(spec, ARCHITECTURE) | {
        "rope_interleave": interleave,
        "num_nextn_predict_layers": len(spec.weights.passthrough),
    }
