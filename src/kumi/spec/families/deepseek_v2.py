"""DeepSeek-V2 and V2-Lite (arXiv:2405.04434), the latter without a query latent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kumi.errors import ModelError
from kumi.spec.families._shared.config_keys import Key, read, require_values
from kumi.spec.families._shared.deepseek_layers import LATENT_KEYS, build_deepseek, deepseek_to_hf
from kumi.spec.model import ModelSpec

_TOPK_METHODS = ("greedy", "group_limited_greedy")
ARCHITECTURE = "DeepseekV2ForCausalLM"
KEYS = {
    **LATENT_KEYS,
    "max_position_embeddings": Key("integer", 2_048),
    "n_shared_experts": Key("integer or null", 2),
    "bos_token_id": Key("integer or null", 1),
    "eos_token_id": Key("integer or list of integers or null", 2),
    "scoring_func": Key("text", "softmax"),
    "topk_method": Key("text", "greedy"),
    "mlp_bias": Key("true or false", False),
    "rms_norm_eps": Key("number", 1e-6),
}


def from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """Return the model that a config.json with model_type "deepseek_v2" describes."""
    values = read("deepseek_v2", config, KEYS)
    # transformers never divides the chosen scores by their sum, whatever norm_topk_prob says.
    require_values("deepseek_v2", values, scoring_func="softmax", mlp_bias=False, norm_topk_prob=False)
    if values["topk_method"] not in _TOPK_METHODS:
        raise ModelError(
            f"config.json: topk_method={values['topk_method']!r} of a deepseek_v2 model is not supported; "
            f"kumi supports {', '.join(_TOPK_METHODS)}"
        )
    return build_deepseek("deepseek_v2", values, scoring="softmax")


def to_hf(spec: ModelSpec) -> dict[str, Any]:
    """Return the config.json of `spec`."""
    return deepseek_to_hf(spec, ARCHITECTURE) | {"mlp_bias": False}
