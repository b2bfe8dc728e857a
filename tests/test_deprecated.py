"""Documented imports that moved go on working at their old paths, with a warning that names the new one."""

from __future__ import annotations

from importlib import import_module

import pytest

MOVED = {
    "kumi.plan.export": ("kumi.export", ["export", "unsupported"]),
    "kumi.convert.online": ("kumi.parallel.export_weights", ["export_tensors"]),
    "kumi.spec.rules": ("kumi.spec.weight_rules", ["Rename", "Weights"]),
    "kumi.spec.families.keys": ("kumi.spec.families._shared.config_keys", ["DECODER", "Key"]),
    "kumi.spec.families.common": ("kumi.spec.families._shared.decoder_config", ["build_llama_like", "check_sizes"]),
}


@pytest.mark.parametrize("old", MOVED)
def test_the_old_path_warns_and_gives_the_same(old):
    new, names = MOVED[old]
    for name in names:
        with pytest.warns(DeprecationWarning, match=f"{old} moved to {new}; import {name} from there"):
            value = getattr(import_module(old), name)
        assert value is getattr(import_module(new), name)


@pytest.mark.parametrize(
    ("module", "old", "current"),
    [
        ("common", "to_hf", "common_to_hf"),
        ("common", "dense", "first_dense_mlp"),
        ("common", "grouped", "first_grouped_attention"),
        ("common", "model", "build_model"),
        ("common", "windowed", "layers_with_windows"),
        ("keys", "neutral", "require_values"),
    ],
)
def test_a_name_that_changed_is_the_new_one(module, old, current):
    with pytest.warns(DeprecationWarning, match=f"import {current} from there"):
        value = getattr(import_module(f"kumi.spec.families.{module}"), old)
    new = {"common": "decoder_config", "keys": "config_keys"}[module]
    assert value is getattr(import_module(f"kumi.spec.families._shared.{new}"), current)


def test_a_name_that_never_was_is_an_error():
    with (
        pytest.warns(DeprecationWarning, match="moved to"),
        pytest.raises(AttributeError, match="no attribute 'nothing'"),
    ):
        import_module("kumi.plan.export").nothing  # noqa: B018
