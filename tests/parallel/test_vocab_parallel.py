"""The head with a vocabulary sharded over tp: log-probs, statistics and gradients are those of one rank, in float64."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from kumi.nn import logit_chunks, logprob
from kumi.nn.logit_chunks import NO_SHAPING, Shaping
from kumi.objectives import IGNORED
from kumi.parallel.vocab_parallel import VocabularyShard
from ranks import run_ranks

TOKENS, SIZE, VOCAB = 12, 6, 11  # the second of two ranks has a padding row


def _inputs(share):
    """Return hidden states, the head's weight, labels, a `share` ignored, weights, trained positions."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(TOKENS, SIZE, generator=generator, dtype=torch.float64)
    weight = torch.randn(VOCAB, SIZE, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    labels[torch.randperm(TOKENS, generator=generator)[: round(share * TOKENS)]] = IGNORED
    token_weights = torch.rand(TOKENS, generator=generator, dtype=torch.float64)
    return hidden, weight, labels, token_weights, (labels != IGNORED).nonzero()[:, 0]


def _results(hidden, weight, labels, token_weights, linear, **options):
    """Return the scores of the labels, and the gradients of the weighted sum of their log-probs."""
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    if linear:
        total, *scores = logprob.weighted_sum(hidden, weight, labels, token_weights, **options)
    else:
        scores = logprob.log_probs(hidden, weight, labels, **options, statistics=("entropy", "top"))
        total = (scores.log_probs * token_weights).sum()
    grads = torch.autograd.grad(total, (hidden, weight))
    return [tensor.detach().numpy() for tensor in (*scores, *grads)]


def _sharded(share, linear, sequence_parallel, shaping, chosen):
    """Return this rank's results, its first row of the vocabulary, and its tokens of the gradient."""
    original, logit_chunks.logit_chunk = logit_chunks.logit_chunk, lambda vocab_size, device_kind: 5
    try:
        hidden, weight, labels, token_weights, positions = _inputs(share)
        vocabulary = VocabularyShard(dist.group.WORLD, VOCAB, sequence_parallel)
        padded = torch.cat([weight, weight.new_zeros(2 * vocabulary.count - VOCAB, SIZE)])
        part = slice(vocabulary.first, vocabulary.first + vocabulary.count)
        tokens = slice(dist.get_rank() * TOKENS // 2, (dist.get_rank() + 1) * TOKENS // 2)
        tokens = tokens if sequence_parallel else slice(None)
        options = {"vocabulary": vocabulary, "shaping": shaping, "trained": positions if chosen else None}
        return _results(hidden[tokens], padded[part], labels, token_weights, linear, **options), part, tokens
    finally:
        logit_chunks.logit_chunk = original


@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sp", "tp"])
@pytest.mark.parametrize("linear", [True, False], ids=["weighted-sum", "log-probs"])
@pytest.mark.parametrize(
    ("share", "chosen", "shaping"),
    [
        (0.4, True, NO_SHAPING),
        (0.4, False, Shaping(2.0, 0.7)),
        (0.9, True, Shaping(2.0, 0.7)),
        (1.0, True, NO_SHAPING),
        pytest.param(0.0, False, NO_SHAPING, marks=pytest.mark.exhaustive),
        pytest.param(0.0, True, NO_SHAPING, marks=pytest.mark.exhaustive),
        pytest.param(1.0, False, NO_SHAPING, marks=pytest.mark.exhaustive),
    ],
)
def test_two_ranks_give_the_same_as_one(sequence_parallel, linear, share, chosen, shaping):
    *inputs, _ = _inputs(share)
    *scores, grad_hidden, grad_weight = _results(*inputs, linear, shaping=shaping)
    for results, part, tokens in run_ranks(2, _sharded, share, linear, sequence_parallel, shaping, chosen):
        *own_scores, own_grad_hidden, own_grad_weight = map(torch.from_numpy, results)
        rows = len(grad_weight[part])
        pairs = [*zip(own_scores, scores), (own_grad_hidden, grad_hidden[tokens])]
        for own, expected in [*pairs, (own_grad_weight[:rows], grad_weight[part])]:
            torch.testing.assert_close(own, torch.from_numpy(expected), rtol=1e-12, atol=1e-12)
        assert not own_grad_weight[rows:].any()
