"""Configurations of every family agree with transformers: written files, and defaults of omitted keys."""

from __future__ import annotations

import pytest
import transformers

from kumi.spec import families
from tiny_models import CASES, SIZES, WITHOUT, config_of


@pytest.mark.parametrize("name", CASES)
def test_transformers_reads_what_is_written(name):
    config = config_of(*CASES[name])
    spec = families.from_hf(config.to_dict() | {"architectures": None})
    again = type(config).from_dict(families.to_hf(spec))
    assert families.from_hf(again.to_dict()) == spec


# Keys besides sizes that a config must have here.
WRITTEN = ("rms_norm_eps", "n_routed_experts", "num_local_experts", "num_experts")
# Families whose sizes have other names, that have more sizes than these, or that must have RoPE settings.
APART = ("GPT2", "NemotronH", "Glm4Moe", "DeepseekV2", "DeepseekV3", "Ministral3")
FAMILIES = sorted({family for family, changes in CASES.values() if "text_config" not in changes} - set(APART))


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_left_out_is_what_transformers_assumes(family):
    given = {key: value for key, value in SIZES.items() if key not in (*WITHOUT.get(family, ()), "initializer_range")}
    config = getattr(transformers, f"{family}Config")(**given)
    keys = families.FAMILIES[config.model_type].KEYS
    defaults = {key: getattr(config, key) for key in WRITTEN if key in keys and hasattr(config, key)}
    if "num_experts" in defaults:
        defaults.pop("num_local_experts", None)
    spec = families.from_hf({"model_type": config.model_type, **given, **defaults})
    assert spec == families.from_hf(config.to_dict() | {"architectures": None})
