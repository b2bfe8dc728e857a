"""Kimi-K2 (arXiv:2507.20534): DeepSeek-V3 in other sizes and with another model_type.

transformers has no class for this model_type. The model's code comes with its folder (`auto_map`), as does that of its
tokenizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kumi.spec.families import deepseek_v3
from kumi.spec.model import ModelSpec

ARCHITECTURE = deepseek_v3.ARCHITECTURE
KEYS = deepseek_v3.KEYS


def from_hf(config: Mapping[str, Any]) -> ModelSpec:
    """Return the model that a config.json with model_type "kimi_k2" describes."""
    return deepseek_v3.deepseek_v3_from_hf("kimi_k2", config)


to_hf = deepseek_v3.to_hf
