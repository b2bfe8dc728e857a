"""By the rules of each family, every element of the files' tensors is one element of one native tensor."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kumi.spec import ledger
from kumi.spec.model import MLP, Attention, LayerSpec, ModelSpec, MoE, Rope
from kumi.spec.weight_rules import EXPERTS, QKV, Groups, Pairs, Rename, Rows, Weights
from kumi.spec.weights import stored_parts, stored_tensors

ATTENTION = Attention(4, 2, 6, Rope(1e4), qkv_bias=True, out_bias=True)
DENSE = LayerSpec(ATTENTION, MLP(20, bias=True))
ROUTED = LayerSpec(ATTENTION, MoE(3, 2, 10, bias=True))
SPEC = ModelSpec("llama", 11, 8, (DENSE, ROUTED), 1e-5, 16)

RULES = {
    "plain": Weights(),
    "rows": Weights((Rows(QKV, "self_attn.qkv"), Rows(("mlp.gate_proj", "mlp.up_proj"), "mlp.both"))),
    "transposed": Weights((Rows(QKV, "attn.c_attn", transposed=True), Rename("self_attn.o_proj", "out", True))),
    "groups": Weights((Groups(QKV, "attn.query_key_value"),), prefixes=(("model.layers.", "h."), ("model.", "m."))),
    "stack": EXPERTS,
    "pairs": Weights(
        (
            Pairs("mlp.experts.gate_up_proj", "mlp.experts.gate_up_proj"),
            Pairs("mlp.experts.gate_up_proj_bias", "mlp.experts.gate_up_proj_bias"),
            Rename("mlp.experts.down_proj", "mlp.experts.down_proj", transposed=True),
        )
    ),
}


def box(start, size):
    return tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))


def natives():
    rng = np.random.default_rng(0)
    return {param.name: rng.standard_normal(param.shape) for param in ledger.tensors(SPEC)}


def written(spec, tensors):
    """Return the tensors of files as their `Part`s place them; elements that no part writes are NaN."""
    weights = {}
    for name, pieces in stored_tensors(spec).items():
        weights[name] = np.full(pieces[0].part.shape, np.nan)
        for piece in pieces:
            part = piece.part
            assert part.shape == pieces[0].part.shape
            target = weights[name].reshape(part.view)[box(part.at, part.size)].transpose(part.order)
            values = tensors[piece.param.name][box(part.start, part.extent)].reshape(target.shape)
            assert np.isnan(target).all()
            weights[name].reshape(part.view)[box(part.at, part.size)] = values.transpose(np.argsort(part.order))
    return weights


@pytest.mark.parametrize("name", RULES)
def test_files_hold_everything_once(name):
    spec, tensors = replace(SPEC, weights=RULES[name]), natives()
    stored = written(spec, tensors)
    assert not any(np.isnan(tensor).any() for tensor in stored.values())
    for param in ledger.tensors(spec):
        back = np.full(param.shape, np.nan)
        for part in stored_parts(spec, param):
            seen = stored[part.name].reshape(part.view)[box(part.at, part.size)].transpose(part.order)
            back[box(part.start, part.extent)] = seen.reshape(part.extent)
        assert (back == tensors[param.name]).all()


def test_what_the_rules_mean():
    """The layouts of published models, spelled out once by hand."""
    tensors, layer = natives(), "model.layers.0.self_attn."
    q, k, v = (tensors[f"{layer}{one}_proj.weight"] for one in "qkv")
    rows = written(replace(SPEC, weights=RULES["rows"]), tensors)
    assert (rows["model.layers.0.self_attn.qkv.weight"] == np.concatenate([q, k, v])).all()
    assert rows["model.layers.0.self_attn.qkv.bias"].shape == (48,)
    conv = written(replace(SPEC, weights=RULES["transposed"]), tensors)
    assert (conv["model.layers.0.attn.c_attn.weight"] == np.concatenate([q, k, v]).T).all()
    assert (conv["model.layers.1.out.weight"] == tensors["model.layers.1.self_attn.o_proj.weight"].T).all()
    # Two key heads of six rows, each after its two query heads.
    groups = written(replace(SPEC, weights=RULES["groups"]), tensors)["h.0.attn.query_key_value.weight"]
    assert (groups == np.concatenate([q[:12], k[:6], v[:6], q[12:], k[6:], v[6:]])).all()
    pairs = written(replace(SPEC, weights=RULES["pairs"]), tensors)
    both = tensors["model.layers.1.mlp.experts.gate_up_proj"]
    assert (pairs["model.layers.1.mlp.experts.gate_up_proj"][:, :, ::2] == both[:, :10].transpose(0, 2, 1)).all()
    assert (pairs["model.layers.1.mlp.experts.gate_up_proj"][:, :, 1::2] == both[:, 10:].transpose(0, 2, 1)).all()
    bias = tensors["model.layers.1.mlp.experts.gate_up_proj_bias"]
    assert (pairs["model.layers.1.mlp.experts.gate_up_proj_bias"][:, 1::2] == bias[:, 10:]).all()
    experts = written(replace(SPEC, weights=RULES["stack"]), tensors)
    assert (experts["model.layers.1.mlp.experts.2.up_proj.weight"] == both[2, 10:]).all()


def test_experts_may_be_one_tensor_in_files():
    spec = replace(SPEC, weights=EXPERTS)
    param = next(param for param in ledger.tensors(spec) if param.name.endswith("experts.down_proj"))
    (part,) = stored_parts(spec, param, stacked=True)
    assert part.is_whole
    assert part.name == param.name
    assert len(stored_parts(spec, param)) == 3
