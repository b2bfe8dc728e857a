"""The expected gradient of each estimator of KL(policy || reference), by enumeration of all replies, against those of
the divergence itself. Five tokens, replies of three: 125 replies, and a distribution for each of 31 prefixes."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch

from kumi.objectives.advantages import rewards_with_kl
from kumi.objectives.policy_gradient import PolicyGradient
from reply_rows import row_sums

VOCAB, LENGTH = 5, 3
REPLIES = torch.tensor(list(product(range(VOCAB), repeat=LENGTH)))
PREFIXES = sum(VOCAB**length for length in range(LENGTH))
# The number of the prefix of each token: 0 for the empty one, then those of one token, ...
FIRST = [sum(VOCAB**length for length in range(size)) for size in range(LENGTH)]
PREFIX_OF = torch.stack([FIRST[t] + (REPLIES[:, :t] * VOCAB ** torch.arange(t).flip(0)).sum(1) for t in range(3)], 1)
# The loss is the sum over the tokens of the replies, for one unit.
SUMS = {"average": "constant", "constant": 1.0, "correction": "none"}


def _table(seed):
    """Return log-probs of every token after every prefix, (prefixes, VOCAB)."""
    random = torch.Generator().manual_seed(seed)
    return torch.randn(PREFIXES, VOCAB, generator=random, dtype=torch.float64).log_softmax(-1)


def _tokens(table):
    """Return the log-probs of the tokens of all replies, (125, 3)."""
    return table[PREFIX_OF, REPLIES]


REFERENCE, OTHER = _tokens(_table(1)), _tokens(_table(2))


@pytest.fixture
def logits():
    return _table(0).clone().requires_grad_()


def _policy(logits):
    return logits.log_softmax(-1)


def _expected(logits, weights, sampler=None):
    """Return the expectation, over replies of the policy or of `sampler`, of the gradient of a loss with `weights`, its
    derivatives with respect to the log-probs of the tokens (125, 3)."""
    log_probs = _tokens(_policy(logits))
    chances = (log_probs if sampler is None else sampler).sum(1).exp().detach()
    [grad] = torch.autograd.grad((chances[:, None] * weights * log_probs).sum(), logits)
    return grad


def _weights(logits, objective, old=None, advantages=None):
    """Return the derivatives of the objective on one row for each reply."""
    log_probs = _tokens(_policy(logits)).detach().requires_grad_()
    batch = {
        "labels": REPLIES,
        "segments": torch.zeros_like(REPLIES),
        "trained": torch.full((len(REPLIES), 1), LENGTH),
        "advantages": torch.zeros_like(log_probs) if advantages is None else advantages,
        "reference_log_probs": REFERENCE,
    } | ({} if old is None else {"old_log_probs": old})
    [weights] = torch.autograd.grad(objective.loss(log_probs, batch, 1.0, row_sums), log_probs)
    return weights


def _exact(logits):
    """Return the gradient of KL(policy || reference) of complete replies."""
    log_probs = _tokens(_policy(logits)).sum(1)
    [grad] = torch.autograd.grad((log_probs.exp() * (log_probs - REFERENCE.sum(1))).sum(), logits)
    return grad


def _of_tokens(logits, sampler=None):
    """Return the gradient of the sum over prefixes of the divergence of the next token, weighted by the probability of
    the prefix by the policy or by `sampler`, which is held fixed."""
    log_probs = _policy(logits)
    chances = (_tokens(log_probs) if sampler is None else sampler).detach().sum(1).exp()
    reached = torch.zeros(PREFIXES, dtype=torch.float64)
    for t in range(LENGTH):
        reached.index_add_(0, PREFIX_OF[:, t], chances)
    divergences = (log_probs.exp() * (log_probs - _table(1))).sum(1)
    [grad] = torch.autograd.grad((reached * divergences).sum(), logits)
    return grad


def _distance(a, b):
    """Return the norm of the difference relative to that of `b`."""
    return ((a - b).norm() / b.norm()).item()


def _k1(logits):
    return (_tokens(_policy(logits)) - REFERENCE).detach()


def test_the_two_divergences_differ(logits):
    assert _distance(_of_tokens(logits), _exact(logits)) > 0.1


def test_k1_in_the_loss_has_no_gradient(logits):
    """Its derivative with respect to a log-prob is 1, and the expectation of the gradient of a log-prob is zero."""
    assert _expected(logits, torch.ones(len(REPLIES), LENGTH)).abs().max() < 1e-15
    assert _exact(logits).abs().max() > 0.1


@pytest.mark.parametrize("kl", ["k2", "k3"])
def test_a_term_of_the_loss_has_the_gradient_of_each_token_s_divergence(logits, kl):
    objective = PolicyGradient(kl=kl, beta=1.0, **SUMS)
    expected = _expected(logits, _weights(logits, objective))
    assert _distance(expected, _of_tokens(logits)) < 1e-12
    assert _distance(expected, _exact(logits)) > 0.1


def test_on_replies_of_an_older_policy_only_k3_with_its_ratio_is_right(logits):
    right = _of_tokens(logits, OTHER)
    k3, k2 = (
        _expected(logits, _weights(logits, PolicyGradient(kl=kl, beta=1.0, **SUMS), OTHER), OTHER)
        for kl in ("k3", "k2")
    )
    assert _distance(k3, right) < 1e-12
    assert _distance(k2, right) > 0.1


def test_k3_without_its_ratio_is_the_gradient_of_no_such_divergence(logits):
    weights = 1 - (-_k1(logits)).exp()  # of e^(r - l) - (r - l) - 1
    expected = _expected(logits, weights)
    assert _distance(expected, _exact(logits)) > 0.1
    assert _distance(expected, _of_tokens(logits)) > 0.1


@pytest.mark.parametrize("options", [{"ratio": "none", "clip": "none"}, {"clip": "none"}])
def test_k1_in_the_reward_is_exact(logits, options):
    log_probs = _tokens(_policy(logits)).detach()
    sums = (log_probs.sum(1).numpy()[None], REFERENCE.sum(1).numpy()[None])
    rewards = rewards_with_kl(np.zeros((1, len(REPLIES))), *sums, 1.0)
    advantages = torch.from_numpy(rewards[0])[:, None].expand(-1, LENGTH)
    objective = PolicyGradient(kl="reward", beta=1.0, **options, **SUMS)
    expected = _expected(logits, _weights(logits, objective, log_probs, advantages))
    assert _distance(expected, _exact(logits)) < 1e-12


def test_k2_on_sums_of_replies_is_exact(logits):
    sums = _k1(logits).sum(1, keepdim=True)  # the derivative of (L - R)^2 / 2
    assert _distance(_expected(logits, sums.expand(-1, LENGTH)), _exact(logits)) < 1e-12


def test_distillation_has_the_gradient_of_each_token_s_divergence(logits):
    """The teacher's log-prob minus the policy's, as the advantage of a token, is -k1 of that token alone."""
    objective = PolicyGradient(advantage="teacher", clip="none", **SUMS)
    log_probs = _tokens(_policy(logits)).detach()
    expected = _expected(logits, _weights(logits, objective, log_probs, REFERENCE - log_probs))
    assert _distance(expected, _of_tokens(logits)) < 1e-12
