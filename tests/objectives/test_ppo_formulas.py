"""Advantages, returns, whitening and the critic's loss of PPO, against formulas of single replies."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kumi.errors import ConfigError
from kumi.objectives import IGNORED
from kumi.objectives.policy_gradient import PolicyGradient
from kumi.objectives.ppo import ValueLoss, explained_variance, gae, moments, token_rewards, whitened
from reply_rows import make_rows, random_replies_of, row_sums

GAMMA, LAMBDA = 0.9, 0.8
# Trained tokens: a full row, one that ends early, one with two observations between turns, one token, none.
TRAINED = np.array(
    [[1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0, 0], [1, 1, 0, 0, 1, 1, 0], [0, 1, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0]],
    bool,
)


def _random(seed):
    return np.random.default_rng(seed).normal(size=TRAINED.shape)


def test_rewards_are_at_the_last_token_of_a_reply():
    rewards, k1 = np.array([1.0, -2.0, 3.0, 4.0, 5.0]), _random(1)
    result = token_rewards(rewards, k1, TRAINED, 0.3)
    for row, (reward, trained) in enumerate(zip(rewards, TRAINED, strict=True)):
        for at in range(TRAINED.shape[1]):
            expected = -0.3 * k1[row, at] if trained[at] else 0.0
            if trained[at] and not trained[at + 1 :].any():
                expected += reward
            assert result[row, at] == pytest.approx(expected, rel=1e-12)


def test_advantages_are_discounted_sums_over_the_trained_tokens():
    rewards, values = _random(2), _random(3)
    advantages, returns = gae(rewards, values, TRAINED, GAMMA, LAMBDA)
    assert (advantages[~TRAINED] == 0).all()
    assert (returns[~TRAINED] == 0).all()
    for row, trained in enumerate(TRAINED):
        places = np.flatnonzero(trained)
        reward, value = rewards[row, places], np.append(values[row, places], 0.0)
        deltas = [reward[t] + GAMMA * value[t + 1] - value[t] for t in range(len(places))]
        for t, place in enumerate(places):
            expected = sum((GAMMA * LAMBDA) ** k * deltas[t + k] for k in range(len(places) - t))
            assert advantages[row, place] == pytest.approx(expected, rel=1e-12)
            assert returns[row, place] == pytest.approx(expected + value[t], rel=1e-12)


def test_without_discounts_a_return_is_the_sum_of_the_rewards_to_come():
    rewards, values = _random(4), _random(5)
    _, returns = gae(rewards, values, TRAINED, 1.0, 1.0)
    for row, trained in enumerate(TRAINED):
        for at in np.flatnonzero(trained):
            assert returns[row, at] == pytest.approx(rewards[row, at:][trained[at:]].sum(), rel=1e-12)


def test_whitening_is_over_all_tokens_of_the_step():
    """The moments of two ranks add up, whatever replies they have."""
    advantages = 3 + 2 * _random(6)
    chosen = advantages[TRAINED]
    expected = (advantages - chosen.mean()) / np.sqrt(chosen.var(ddof=1) + 1e-8)
    for cut in (1, 2, 4):
        step = sum(moments(advantages[part], TRAINED[part]) for part in (slice(cut), slice(cut, None)))
        for part in (slice(cut), slice(cut, None)):
            result = whitened(advantages[part], TRAINED[part], step)
            assert result == pytest.approx(np.where(TRAINED[part], expected[part], 0.0), rel=1e-10)


def test_equal_advantages_and_single_tokens_have_no_variance():
    equal, single = np.full(TRAINED.shape, 0.7), TRAINED & (np.arange(len(TRAINED)) == 3)[:, None]
    assert whitened(equal, TRAINED, moments(equal, TRAINED)) == pytest.approx(0.0, abs=1e-3)
    assert (whitened(equal, single, moments(equal, single)) == equal).all()


def _critic_batch():
    replies = random_replies_of(9, 6, 30, seed=2, spread=1.0, middle=0.0)
    for reply in replies:
        reply.values = {"advantages": reply.values["old_log_probs"], "old_log_probs": reply.values["sampler_log_probs"]}
    batch = make_rows(replies, [[0, 3, 4], [1, 2], [5], [8, 7, 6]], 40)
    return {
        **{name: batch[name] for name in ("labels", "segments", "trained")},
        "returns": batch["advantages"],
        "old_values": batch["old_log_probs"],
    }


@pytest.mark.parametrize("clip", [0.4, None])
def test_the_critic_s_loss_is_the_larger_of_two_squares(clip):
    batch, objective = _critic_batch(), ValueLoss(value_clip=clip)
    # Some replies have no return.
    batch["returns"] = torch.where(batch["segments"] == 1, torch.nan, batch["returns"])
    trained = (batch["labels"] != IGNORED) & batch["returns"].isfinite()
    assert 0 < trained.sum() < (batch["labels"] != IGNORED).sum()
    random = torch.Generator().manual_seed(4)
    values = torch.randn(trained.shape, generator=random, dtype=torch.float64).masked_fill(~trained, 0)
    values.requires_grad_()
    units = objective.count(batch)
    assert units == trained.sum()
    loss = objective.loss(values, batch, units, row_sums)
    [grads] = torch.autograd.grad(loss, values)
    total, still = 0.0, 0
    columns = (values.detach(), batch["returns"], batch["old_values"], grads)
    for value, target, old, grad in zip(*(column[trained].tolist() for column in columns), strict=True):
        near = value if clip is None else min(max(value, old - clip), old + clip)
        total += max((value - target) ** 2, (near - target) ** 2) / 2
        # A value that is further from the old one than the clip, in the direction of the return, has no gradient.
        passed = (near - target) ** 2 > (value - target) ** 2
        still += passed
        assert grad == pytest.approx(0.0 if passed else (value - target) / units, rel=1e-12)
    assert loss.item() == pytest.approx(total / units, rel=1e-12)
    assert (still > 0) == (clip is not None)
    assert (grads[~trained] == 0).all()
    assert objective.measure(values.detach(), batch, row_sums).tolist() == [[still, units]]


def test_the_explained_variance_is_1_for_the_returns_and_0_for_their_mean():
    returns = _random(7).ravel()
    assert explained_variance(returns, returns) == 1
    assert explained_variance(np.full_like(returns, 3.0), returns) == pytest.approx(0, abs=1e-12)
    assert explained_variance(-returns, returns) == pytest.approx(-3)
    assert np.isnan(explained_variance(returns, np.ones_like(returns)))


def test_the_policy_s_loss_takes_an_advantage_for_each_token():
    replies = random_replies_of(7, 6, 30, seed=8, tokenwise=True)
    rows = [[0, 1], [2, 3, 4], [5, 6]]
    batch = make_rows(replies, rows, 40)
    policy = [reply.values["reference_log_probs"] for reply in replies]
    log_probs = torch.zeros(batch["labels"].shape, dtype=torch.float64)
    log_probs[batch["labels"] >= 0] = torch.from_numpy(np.concatenate(policy))
    total = 0.0
    for reply, ours in zip(replies, policy, strict=True):
        for advantage, new, old in zip(reply.values["advantages"], ours, reply.values["old_log_probs"], strict=True):
            ratio = np.exp(new - old)
            total -= min(ratio * advantage, np.clip(ratio, 0.8, 1.2) * advantage)
    objective = PolicyGradient(advantage="gae", clip_high=0.2, correction="none")
    tokens = sum(map(len, policy))
    loss = objective.loss(log_probs, batch, objective.count(batch), row_sums)
    assert loss.item() == pytest.approx(total / tokens, rel=1e-12)


def test_a_clip_of_values_is_above_zero():
    with pytest.raises(ConfigError, match=r"value_clip=0\.0 must be above 0"):
        ValueLoss(value_clip=0.0)
