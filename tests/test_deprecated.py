"""Documented imports that moved go on working at their old paths, with a warning that names the new one."""

from __future__ import annotations

from importlib import import_module

import pytest

MOVED = {
    "kumi.plan.export": ("kumi.export", ["export", "unsupported"]),
    "kumi.convert.online": ("kumi.parallel.export_weights", ["export_tensors"]),
    "kumi.spec.rules": ("kumi.spec.weight_rules", ["Rename", "Weights"]),
    "kumi.spec.families.keys": ("kumi.spec.families._shared.config_keys", ["DECODER", "Key"]),
    "kumi.spec.families.common": (
        "kumi.spec.families._shared.decoder_config",
        ["check_sizes", "dense", "grouped", "model", "windowed"],
    ),
}


@pytest.mark.parametrize("old", MOVED)
def test_the_old_path_warns_and_gives_the_same(old):
    new, names = MOVED[old]
    for name in names:
        with pytest.warns(DeprecationWarning, match=f"{old} moved to {new}; import {name} from there"):
            value = getattr(import_module(old), name)
        assert value is getattr(import_module(new), name)


def test_a_name_that_changed_with_the_move_is_the_new_one():
    with pytest.warns(DeprecationWarning, match="import common_to_hf from there"):
        old = import_module("kumi.spec.families.common").to_hf
    assert old is import_module("kumi.spec.families._shared.decoder_config").common_to_hf


def test_a_name_that_never_was_is_an_error():
    with (
        pytest.warns(DeprecationWarning, match="moved to"),
        pytest.raises(AttributeError, match="no attribute 'nothing'"),
    ):
        import_module("kumi.plan.export").nothing  # noqa: B018
