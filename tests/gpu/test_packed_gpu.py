"""Documents packed into a row on the GPU give the same results as each alone."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")  # the tiny models are written as its configs
from tiny_models import build_pair

LENGTHS = (5, 17, 1, 9)
# Relative to the log-probs' spread: rounding differs with the shapes of the matmuls.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-2}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    "name", ["llama", "llama-head-dim", "mistral-window", "qwen3", "gemma2", "bloom", "falcon-alibi"]
)
def test_a_packed_row_equals_its_documents(name, dtype, device):
    _, decoder = build_pair(name)
    decoder.to(device).compute_dtype = dtype
    generator = torch.Generator().manual_seed(3)
    documents = [torch.randint(0, decoder.spec.vocab_size, (1, length + 1), generator=generator) for length in LENGTHS]
    ids = torch.cat([document[:, :-1] for document in documents], dim=1).to(device)
    labels = torch.cat([document[:, 1:] for document in documents], dim=1).to(device)
    numbers = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))[None].int().to(device)
    weights = torch.full(ids.shape, -1 / ids.numel(), device=device)

    loss, packed = decoder(ids, labels=labels, token_weights=weights, document_ids=numbers)
    loss.backward()
    packed_gradients = {key: parameter.grad for key, parameter in decoder.named_parameters()}
    decoder.zero_grad(set_to_none=True)
    alone = []
    for document in documents:
        document = document.to(device)
        part = torch.full((1, document.shape[1] - 1), -1 / ids.numel(), device=device)
        loss, log_probs = decoder(document[:, :-1], labels=document[:, 1:], token_weights=part)
        loss.backward()
        alone.append(log_probs)
    separate = torch.cat(alone, dim=1)
    assert (packed - separate).abs().max() <= TOLERANCE[dtype] * separate.std()
    for key, parameter in decoder.named_parameters():
        if key.endswith("k_proj.bias"):  # without RoPE this bias adds the same to all scores of a query
            continue
        difference = (parameter.grad - packed_gradients[key]).norm()
        assert difference <= TOLERANCE[dtype] * parameter.grad.norm(), key
