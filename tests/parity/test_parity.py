"""Every family against transformers on tiny random weights: logits, loss, gradients, names, shapes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tiny_models import CASES, build_pair

from kumi.spec import ledger


@pytest.mark.parametrize("name", CASES)
def test_logits_loss_and_gradients(name):
    reference, decoder = build_pair(name)
    ids = torch.randint(0, decoder.spec.vocab_size, (2, 24), generator=torch.Generator().manual_seed(1))
    expected = reference(input_ids=ids, use_cache=False).logits
    assert (decoder(ids) - expected).abs().max() <= 1e-5

    labels = ids.roll(-1, dims=1)
    loss = F.cross_entropy(expected.flatten(0, 1), labels.flatten())
    loss.backward()
    total, log_probs = decoder(ids, labels=labels, token_weights=torch.full(labels.shape, 1 / labels.numel()))
    (-total).backward()
    torch.testing.assert_close(-total, loss, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(-log_probs.mean(), loss, rtol=1e-6, atol=1e-6)
    ours, theirs = dict(decoder.named_parameters()), dict(reference.named_parameters())
    assert ours.keys() == theirs.keys()
    for key, parameter in ours.items():
        difference = (parameter.grad - theirs[key].grad).abs().max()
        assert difference <= 1e-5 * theirs[key].grad.abs().max() + 1e-7, key


@pytest.mark.parametrize("name", CASES)
def test_ledger_has_the_parameters_of_the_module(name):
    _, decoder = build_pair(name)
    listed = {param.name: param.shape for param in ledger.params(decoder.spec)}
    assert listed == {key: tuple(value.shape) for key, value in decoder.named_parameters()}
