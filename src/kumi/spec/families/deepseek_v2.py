"""DeepSeek-V2 and V2-Lite (arXiv:2405.04434), the latter without a query latent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kumi.spec.families.keys import Key, neutral, read
from kumi.spec.families.latent import LATENT_KEYS, build
from kumi.spec.model import ModelSpec

ARCHITECTURE = "DeepseekV2ForCausalLM"
KEYS = {
    **LATENT_KEYS,
    "scoring_func": Key("text", "softmax"),
    "mlp_bias": Key("true or false", False),
    "rms_norm_eps": Key("number", 1e-6),
}


def from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """The model that a config.json with model_type "deepseek_v2" describes."""
    values = read("deepseek_v2", config, KEYS)
    neutral("deepseek_v2", values, scoring_func="softmax", mlp_bias=False)
    return build("deepseek_v2", values, scoring="softmax")
