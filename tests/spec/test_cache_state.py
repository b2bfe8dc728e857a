"""The tensors of the cache of generation: shapes by hand, and their shards against those of the weights."""

from dataclasses import replace

import pytest
from published_models import PUBLISHED

from kumi.spec import families
from kumi.spec.attention_ops import MIXER_OPS
from kumi.spec.cache_state import CACHE_TENSORS, cache_bytes, cache_layers, context_that_fits, sequences_that_fit
from kumi.spec.ledger import params
from kumi.spec.model import Attention, LatentAttention, LayerSpec, Mamba, ModelSpec, Rope
from kumi.spec.sharding import shard_shape

LLAMA = families.from_hf(PUBLISHED["Llama-3.2-1B"][0])
ROPE = Rope(10_000.0)
LATENT = LatentAttention(8, None, 512, 128, 64, 128, ROPE)
MAMBA = Mamba(num_heads=16, head_dim=64, state_size=128, n_groups=8, conv_kernel=4, chunk_size=128)
GROUPED = Attention(8, 4, 32, ROPE)


def _model(*mixers):
    layers = tuple(LayerSpec(mixer, None) for mixer in mixers)
    return ModelSpec("test", 100, 256, layers, 1e-5, max_position_embeddings=4096)


def _shapes(mixer, length, tp=1):
    (layer,) = cache_layers(_model(mixer))
    return {tensor.name: tensor.shape(length, tp) for tensor in layer.tensors}


def test_every_kind_of_mixer_has_a_cache():
    assert set(CACHE_TENSORS) == set(MIXER_OPS)


def test_attention_keeps_keys_and_values_of_its_heads():
    assert _shapes(GROUPED, 100) == {"key": (100, 4, 32), "value": (100, 4, 32)}
    assert cache_bytes(_model(GROUPED), 3, 100, "bfloat16") == 3 * 2 * 100 * 4 * 32 * 2


def test_a_sliding_window_keeps_its_latest_positions():
    windowed = replace(GROUPED, sliding_window=64)
    assert _shapes(windowed, 40)["key"] == (40, 4, 32)
    assert _shapes(windowed, 4000)["key"] == (64, 4, 32)


def test_latent_attention_keeps_one_vector_on_every_rank():
    assert _shapes(LATENT, 100) == {"latent": (100, 576)} == _shapes(LATENT, 100, tp=4)


def test_a_mamba_mixer_keeps_a_fixed_size_whose_recurrent_part_is_wide():
    fixed = {"x_conv": (3, 1024), "b_conv": (3, 1024), "c_conv": (3, 1024), "ssm": (16, 64, 128)}
    assert _shapes(MAMBA, 1) == fixed == _shapes(MAMBA, 4000)
    size = {"bfloat16": (2, 4), "float32": (4, 4), "float64": (8, 8)}
    for dtype, (narrow, wide) in size.items():
        assert cache_bytes(_model(MAMBA), 1, 1, dtype) == 9 * 1024 * narrow + 16 * 64 * 128 * wide


def test_a_layer_without_a_mixer_keeps_nothing():
    assert cache_bytes(_model(None, GROUPED, None), 1, 10, "float32") == cache_bytes(_model(GROUPED), 1, 10, "float32")
    assert [layer.name for layer in cache_layers(_model(None, GROUPED, MAMBA))] == [
        "",
        "model.layers.1.self_attn",
        "model.layers.2.mamba",
    ]


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_shards_have_the_heads_and_channels_of_the_weights(tp):
    model = _model(GROUPED, MAMBA)
    weights = {param.name: shard_shape(param, tp, 1, 1) for param in params(model)}
    (_, key_heads, size), mixer = _shapes(GROUPED, 1, tp)["key"], _shapes(MAMBA, 1, tp)
    assert key_heads * size == weights["model.layers.0.self_attn.k_proj.weight"][0]
    for part in "xbc":
        assert mixer[f"{part}_conv"][1] == weights[f"model.layers.1.mamba.{part}_conv1d.weight"][0]
    assert mixer["ssm"][0] == weights["model.layers.1.mamba.A_log"][0]


def test_the_cache_of_published_models():
    # Llama 3.2 1B: 16 layers of 8 heads of 64, 32 KiB a token in bfloat16.
    assert cache_bytes(LLAMA, 1, 1, "bfloat16") == 2 * 16 * 8 * 64 * 2 == 32 * 1024
    assert cache_bytes(LLAMA, 64, 4096, "bfloat16") == 8 * 2**30
    # 8 key-value heads on 16 ranks: each head is on two of them.
    assert cache_bytes(LLAMA, 1, 1, "bfloat16", tp=16) == cache_bytes(LLAMA, 1, 1, "bfloat16", tp=8) == 4096


def test_the_largest_batch_and_context_fill_the_memory():
    memory = 2**30
    assert sequences_that_fit(LLAMA, memory, 4096, "bfloat16") == 8
    assert sequences_that_fit(LLAMA, memory - 1, 4096, "bfloat16") == 7
    assert context_that_fits(LLAMA, memory, 8, "bfloat16") == 4096
    assert context_that_fits(LLAMA, memory - 1, 8, "bfloat16") == 4095
    assert context_that_fits(LLAMA, 2**60, 8, "bfloat16") == LLAMA.max_position_embeddings
    assert context_that_fits(LLAMA, 1024, 1, "bfloat16") == 0
    assert sequences_that_fit(LLAMA, -5, 1, "bfloat16") == 0
