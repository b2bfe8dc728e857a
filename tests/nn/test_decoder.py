"""The decoder: packing, dtypes, building on the meta device. Parity with transformers is in tests/parity."""

from dataclasses import replace

import pytest
import torch

from kumi.errors import ModelError
from kumi.nn import Decoder
from kumi.spec.families import from_hf
from weights import init_weights

CONFIG = {
    "model_type": "qwen3",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "use_sliding_window": True,
    "sliding_window": 4,
    "max_window_layers": 2,
}
SPEC = from_hf(CONFIG)


def make(dtype=torch.float64):
    decoder = Decoder(SPEC, dtype=dtype)
    init_weights(decoder, SPEC, seed=0)
    return decoder


def tokens(length, seed=0):
    return torch.randint(0, 61, (1, length), generator=torch.Generator().manual_seed(seed))


def test_learned_positions_begin_anew_in_every_document():
    config = {"model_type": "gpt2", "vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 12}
    spec = from_hf(config | {"initializer_range": 0.2})
    decoder = Decoder(spec, dtype=torch.float64)
    init_weights(decoder, spec, seed=0)
    parts = [tokens(length, seed) for seed, length in enumerate((5, 1, 12))]
    document_ids = torch.cat([torch.full_like(part, index) for index, part in enumerate(parts)], dim=1)
    packed = decoder(torch.cat(parts, dim=1), document_ids=document_ids)
    torch.testing.assert_close(packed, torch.cat([decoder(part) for part in parts], dim=1))
    with pytest.raises(ModelError, match="the row has 13 tokens, but this gpt2 model has only 12 learned positions"):
        decoder(tokens(13))


def test_packed_documents_equal_separate_ones():
    decoder = make()
    parts = [tokens(length, seed) for seed, length in enumerate((5, 1, 9))]
    ids = torch.cat(parts, dim=1)
    document_ids = torch.cat([torch.full_like(part, index) for index, part in enumerate(parts)], dim=1)
    packed = decoder(torch.cat((ids, ids)), document_ids=torch.cat((document_ids, document_ids)))
    separate = torch.cat([decoder(part) for part in parts], dim=1)
    torch.testing.assert_close(packed[0], separate[0])
    torch.testing.assert_close(packed[1], separate[0])

    positions = torch.cat([torch.arange(part.shape[1]) for part in parts])[None]
    torch.testing.assert_close(decoder(ids, document_ids=document_ids, position_ids=positions), separate)

    grads = torch.autograd.grad(separate.square().sum(), tuple(decoder.parameters()))
    again = decoder(ids, document_ids=document_ids).square().sum()
    torch.testing.assert_close(torch.autograd.grad(again, tuple(decoder.parameters())), grads)


def test_every_way_of_calling_agrees():
    decoder, ids = make(), tokens(12)
    labels = ids.roll(-1, dims=1)
    labels[0, -1] = -100
    expected = torch.log_softmax(decoder(ids), -1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    expected[labels == -100] = 0.0
    log_probs = decoder(ids, labels=labels)
    weights = torch.rand(labels.shape, dtype=torch.float64)
    total, detached = decoder(ids, labels=labels, token_weights=weights)
    for values in (log_probs, detached):
        assert values.shape == labels.shape
        torch.testing.assert_close(values, expected)
    torch.testing.assert_close(total, (expected * weights).sum())
    parameters = tuple(decoder.parameters())
    torch.testing.assert_close(
        torch.autograd.grad(total, parameters), torch.autograd.grad((log_probs * weights).sum(), parameters)
    )


def test_bfloat16_compute_stays_near_float32_and_leaves_the_weights_alone():
    decoder, ids = make(torch.float32), tokens(32)
    exact = decoder(ids, labels=ids)
    decoder.compute_dtype = torch.bfloat16
    assert decoder(ids).dtype == torch.bfloat16
    total, rounded = decoder(ids, labels=ids, token_weights=torch.full(ids.shape, 1 / 32))
    assert rounded.dtype == torch.float32
    assert abs(rounded.mean() - exact.mean()) < 0.01 * abs(exact.mean())
    total.backward()
    assert all(parameter.dtype == parameter.grad.dtype == torch.float32 for parameter in decoder.parameters())


def test_built_on_meta_it_has_no_state_but_parameters():
    decoder = Decoder(SPEC, device="meta", dtype=torch.float64)
    assert not list(decoder.buffers())
    assert decoder(torch.zeros(1, 5, dtype=torch.int64, device="meta")).shape == (1, 5, 61)
    decoder.to_empty(device="cpu")
    init_weights(decoder, SPEC, seed=0)
    ids = tokens(7)
    torch.testing.assert_close(decoder(ids), make()(ids), rtol=0, atol=0)


def test_what_is_only_planned_for_is_not_built():
    with pytest.raises(ModelError, match="a gpt model can be planned for but not trained: this version trains"):
        Decoder(replace(SPEC, family="gpt"), device="meta")
