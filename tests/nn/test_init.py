"""Initial weights: the same whatever the order, the cut or the other parameters."""

from dataclasses import replace

import torch

from kumi.nn import Decoder, initialize
from kumi.spec.families import from_hf
from kumi.spec.op import Dim, Param
from weights import init_weights

CONFIG = {
    "model_type": "qwen2",
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64,
    "initializer_range": 0.05,
}


def decoder(**changes):
    spec = from_hf(CONFIG | changes)
    made = Decoder(spec)
    init_weights(made, spec, seed=3)
    return made


def test_matrices_are_normal_norms_one_biases_zero():
    for name, parameter in decoder().named_parameters():
        if "norm" in name:
            assert (parameter == 1).all()
        elif name.endswith("bias"):
            assert (parameter == 0).all()
        else:
            assert abs(parameter.mean()) < 0.003
            assert abs(parameter.std() - 0.05) < 0.002


def test_norms_around_one_begin_at_zero():
    spec = replace(from_hf(CONFIG), zero_centered_norm=True, learned_positions=64, norm="layernorm")
    init_weights(decoder := Decoder(spec), spec, seed=3)
    for name, parameter in decoder.named_parameters():
        assert not parameter.any() if "norm" in name else name.endswith("bias") or parameter.std() > 0.04
    assert abs(decoder.model.embed_positions.weight.std() - 0.05) < 0.002


def test_parameters_do_not_depend_on_what_else_there_is():
    small, large = dict(decoder().named_parameters()), dict(decoder(num_hidden_layers=3).named_parameters())
    assert all(torch.equal(parameter, large[name]) for name, parameter in small.items())
    first, second = small["model.layers.0.self_attn.q_proj.weight"], small["model.layers.1.self_attn.q_proj.weight"]
    assert not torch.equal(first, second)


def test_seeds_differ():
    spec = from_hf(CONFIG)
    made, other = Decoder(spec), decoder()
    init_weights(made, spec, seed=4)
    assert not torch.equal(made.lm_head.weight, other.lm_head.weight)


def test_shards_are_slices_of_the_whole(monkeypatch):
    monkeypatch.setattr(initialize, "_BLOCK", 7 * 3)
    shape = (50, 3)
    whole = torch.empty(shape)
    param = Param("w", (Dim("a", 50), Dim("b", 3)))
    initialize.fill(whole, param, (0, 0), std=2.0, seed=1)
    for ranks in (1, 2, 3, 8):
        for start in range(0, 50, -(-50 // ranks)):
            part = torch.empty(min(-(-50 // ranks), 50 - start), 3)
            initialize.fill(part, param, (start, 0), std=2.0, seed=1)
            assert torch.equal(part, whole[start : start + len(part)])
    column = torch.empty(20, 1)
    initialize.fill(column, param, (15, 2), std=2.0, seed=1)
    assert torch.equal(column, whole[15:35, 2:])
    initialize.fill(torch.empty(0, 3), param, (50, 0), std=2.0, seed=1)


def test_vectors_and_other_dtypes():
    vector, double = torch.empty(10), torch.empty(10, dtype=torch.float64)
    param = Param("v", (Dim("a", 10),))
    initialize.fill(vector, param, (0,), std=1.0, seed=2)
    initialize.fill(double, param, (0,), std=1.0, seed=2)
    assert torch.equal(vector, double.float())
