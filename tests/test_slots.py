"""No method of a built module is assigned or wrapped: layouts replace only slots that its class declares."""

from __future__ import annotations

import types
from functools import partial

import pytest

from kumi.parallel import build
from kumi.parallel.stage_modules import stages_of
from kumi.spec.layout import Layout
from kumi.spec.precision import PRECISIONS
from steps import SPECS, mesh_of

# Class -> the functions that a layout may replace.
SLOTS = {
    "Decoder": {"make_attention", "make_lengths", "logits", "head_product", "log_probs", "weighted_sum", "scores"},
    "RMSNorm": {"function"},
    "LayerNorm": set(),
    "MLP": {"function"},
    "Embedding": {"lookup"},
    "Linear": {"multiply"},
    "HeadLinear": {"multiply"},
}
LAYOUTS = [
    Layout(),
    Layout(recompute="selective", offload="activations"),
    Layout(tiles=3),
    Layout(tp=2, recompute="full"),
    Layout(cp=2),
    Layout(dp_shard=2, zero=3, recompute="selective"),
    Layout(pp=2, schedule="zb-h1"),
]


def _assigned(layout, family):
    """(class, name) of every function that lies in a module itself, not in its class."""
    made = build(SPECS[family], mesh_of(layout), PRECISIONS["fp32"], weights=0, compile=layout.dp == 1)
    parts = [part for stage in stages_of(made).values() for part in stage.modules()]
    callables = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, partial)
    return {
        (type(part).__name__.removeprefix("FSDP"), name)
        for part in parts
        for name, value in vars(part).items()
        if isinstance(value, callables) and not name.startswith("_")
    }


@pytest.mark.parametrize("family", ["llama", "moe"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_only_declared_slots_hold_functions(ranks, layout, family):
    for assigned in ranks(layout.world_size, _assigned, layout, family):
        assert [(kind, name) for kind, name in sorted(assigned) if name not in SLOTS.get(kind, set())] == []
        assert {name for _, name in assigned} >= {"function"}
