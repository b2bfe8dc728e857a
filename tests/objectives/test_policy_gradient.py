"""The loss of policy gradients against formulas of single replies in numpy, its weights, metrics and refusals."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from kumi.errors import ConfigError
from kumi.objectives.advantages import group_advantages, rewards_with_kl, teacher_advantages
from kumi.objectives.policy_gradient import PolicyGradient
from kumi.objectives.policy_presets import POLICY_GRADIENTS
from reply_rows import COLUMNS, make_rows, random_replies_of, row_sums

VOCAB, COUNT, SEQ_LEN = 50, 12, 40
ALONE = [[number] for number in range(COUNT)]
PACKED = [[7, 0, 3], [5], [1, 11, 2, 4], [8, 6, 9, 10]]


def _replies(tokenwise=False):
    return random_replies_of(COUNT, 7, VOCAB, seed=3, tokenwise=tokenwise)


def _policy(replies):
    """Return the log-probs of each reply by the policy."""
    random = np.random.default_rng(9)
    return [-np.log(VOCAB) + 0.3 * random.normal(size=len(reply.ids)) for reply in replies]


def _place(values, rows, batch):
    """Return arrays of the replies' tokens as (B, S), in the order of `rows`."""
    placed = torch.zeros(batch["labels"].shape, dtype=torch.float64)
    placed[batch["labels"] >= 0] = torch.from_numpy(np.concatenate([values[number] for row in rows for number in row]))
    return placed


def _loss(objective, replies, policy, rows=PACKED, chunks=1):
    """Return the loss, and its gradient with respect to the log-probs of each reply."""
    batch = make_rows(replies, rows, SEQ_LEN)
    log_probs = _place(policy, rows, batch).requires_grad_()
    units, total = objective.count(batch), 0.0
    for part in torch.arange(len(rows)).chunk(chunks):
        micro = {name: column[part] for name, column in batch.items()}
        total = total + objective.loss(log_probs[part], micro, units, row_sums)
    [grad] = torch.autograd.grad(total, log_probs)
    grads = grad[batch["labels"] >= 0].numpy()
    order = [number for row in rows for number in row]
    ends = np.cumsum([len(policy[number]) for number in order])
    by_number = dict(zip(order, np.split(grads, ends[:-1]), strict=True))
    return total.item(), [by_number[number] for number in range(len(replies))]


def _check(objective, losses, replies, policy):
    """Compare the objective with `losses`, a function of the log-probs of all replies: values and central slopes."""
    value, grads = _loss(objective, replies, policy)
    assert value == pytest.approx(losses(policy), rel=1e-12)
    for number in range(0, COUNT, 3):
        for at in (0, len(policy[number]) - 1):
            slopes = []
            for step in (1e-6, -1e-6):
                moved = [each.copy() for each in policy]
                moved[number][at] += step
                slopes.append(losses(moved))
            assert grads[number][at] == pytest.approx((slopes[0] - slopes[1]) / 2e-6, rel=1e-6, abs=1e-9)


def _old(reply):
    return reply.values["old_log_probs"]


def test_rloo_is_the_clipped_ratio_of_complete_replies():
    replies = _replies()
    policy = [_old(reply) + 0.3 * (_old(reply) - reply.values["sampler_log_probs"]) for reply in replies]

    def losses(log_probs):
        total = 0.0
        for reply, ours in zip(replies, log_probs, strict=True):
            ratio, advantage = np.exp(np.sum(ours - _old(reply))), reply.values["advantages"][0]
            total -= min(ratio * advantage, np.clip(ratio, 0.8, 1.2) * advantage)
        return total / COUNT

    _check(POLICY_GRADIENTS["rloo"](correction="none"), losses, replies, policy)


def test_maxrl_divides_by_the_tokens_of_the_step():
    replies = _replies()
    policy = _policy(replies)

    def losses(log_probs):
        total, tokens = 0.0, 0
        for reply, ours in zip(replies, log_probs, strict=True):
            ratio, advantage = np.exp(ours - _old(reply)), reply.values["advantages"]
            weight = np.minimum(np.exp(_old(reply) - reply.values["sampler_log_probs"]), 2.0)
            total -= (weight * np.minimum(ratio * advantage, np.clip(ratio, 0.8, 1.28) * advantage)).sum()
            tokens += len(ours)
        return total / tokens

    _check(POLICY_GRADIENTS["maxrl"](), losses, replies, policy)


def test_distillation_has_the_gradient_of_the_teacher_s_log_probs():
    """On the batch of the policy itself, each log-prob has the weight (log-prob - teacher) / tokens."""
    replies = _replies()
    policy, teacher = [_old(reply) for reply in replies], [reply.values["reference_log_probs"] for reply in replies]
    for reply, ours, theirs in zip(replies, policy, teacher, strict=True):
        reply.values["advantages"] = teacher_advantages(theirs, ours)
    _, grads = _loss(POLICY_GRADIENTS["distill"](correction="none"), replies, policy)
    tokens = sum(map(len, policy))
    for ours, theirs, grad in zip(policy, teacher, grads, strict=True):
        assert grad == pytest.approx((ours - theirs) / tokens, rel=1e-12)


def test_gspo_has_one_ratio_for_a_reply_and_sequence_masks():
    replies = _replies()
    policy = [_old(reply) + 4e-4 * np.sin(np.arange(len(_old(reply))) + n) for n, reply in enumerate(replies)]
    policy = [ours + 2e-4 * (n % 4 - 2) for n, ours in enumerate(policy)]
    left_out = []

    def losses(log_probs):
        total = 0.0
        left_out.clear()
        for reply, ours in zip(replies, log_probs, strict=True):
            ratio, advantage = np.exp(np.mean(ours - _old(reply))), reply.values["advantages"][0]
            weight = np.exp(np.sum(_old(reply) - reply.values["sampler_log_probs"]))
            left_out.append(not 0.7 <= weight <= 3)
            clipped = np.clip(ratio, 1 - 3e-4, 1 + 4e-4)
            total -= 0 if left_out[-1] else weight * min(ratio * advantage, clipped * advantage)
        return total / COUNT

    _check(POLICY_GRADIENTS["gspo"](correction_low=0.7), losses, replies, policy)
    assert 0 < sum(left_out) < COUNT


def test_icepop_and_the_limit_of_negative_replies():
    replies = _replies()
    policy, dropped = _policy(replies), []

    def losses(log_probs):
        total, tokens = 0.0, 0
        dropped.clear()
        for reply, ours, fixed in zip(replies, log_probs, policy, strict=True):
            ratio, advantage = np.exp(ours - _old(reply)), reply.values["advantages"]
            weight = np.exp(_old(reply) - reply.values["sampler_log_probs"])
            weight[(weight < 0.8) | (weight > 1.3)] = 0
            dropped.append(advantage[0] < 0 and np.mean(reply.values["sampler_log_probs"] - fixed) > 0.02)
            loss = -weight * np.minimum(np.minimum(ratio, 1.5) * advantage, np.clip(ratio, 0.8, 1.28) * advantage)
            total += 0 if dropped[-1] else loss.sum()
            tokens += len(ours)
        return total / tokens

    options = {"correction": "mask", "correction_low": 0.8, "correction_high": 1.3, "negative_limit": 0.02}
    _check(PolicyGradient(**options, delta=1.5), losses, replies, policy)
    assert 0 < sum(dropped) < COUNT


def test_terms_of_the_divergence_are_not_corrected():
    replies = _replies()
    policy = _policy(replies)

    def losses(log_probs, kl):
        total = 0.0
        for reply, ours in zip(replies, log_probs, strict=True):
            gap = reply.values["reference_log_probs"] - ours
            ratio, advantage = np.exp(ours - _old(reply)), reply.values["advantages"]
            weight = np.minimum(np.exp(_old(reply) - reply.values["sampler_log_probs"]), 1.1)
            term = gap**2 / 2 if kl == "k2" else ratio * (np.exp(gap) - gap - 1)
            total += (0.7 * term - weight * ratio * advantage).sum() / 9
        return total / COUNT

    for kl in ("k2", "k3"):
        options = {
            "kl": kl,
            "beta": 0.7,
            "correction_high": 1.1,
            "clip": "none",
            "average": "constant",
            "constant": 9.0,
        }
        _check(PolicyGradient(**options), lambda log_probs, kl=kl: losses(log_probs, kl), replies, policy)


def test_a_token_that_the_reference_excludes_has_a_bounded_gradient():
    replies = _replies()
    replies[0].values["reference_log_probs"][0] = 200.0
    value, grads = _loss(PolicyGradient(kl="k3", beta=0.1), replies, _policy(replies))
    assert np.isfinite(value)
    assert all(np.isfinite(grad).all() for grad in grads)


SETTINGS = {
    **{name: kind(**({"constant": 20.0} if name == "dr_grpo" else {})) for name, kind in POLICY_GRADIENTS.items()},
    "k3": POLICY_GRADIENTS["grpo"](kl="k3", beta=0.04),
    "k2": POLICY_GRADIENTS["gspo"](kl="k2", beta=0.04, negative_limit=0.1),
    "reinforce": PolicyGradient(ratio="none", clip="none", correction="mask"),
    "gae": PolicyGradient(advantage="gae", ratio="sequence"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_packing_order_and_microbatches_change_nothing(name):
    objective, replies = SETTINGS[name], _replies(tokenwise=name in ("distill", "gae"))
    policy = _policy(replies)
    value, grads = _loss(objective, replies, policy, ALONE)
    for rows, chunks in ((PACKED, 1), (PACKED, 4), (ALONE[::-1], 5)):
        other, others = _loss(objective, replies, policy, rows, chunks)
        assert other == pytest.approx(value, rel=1e-12)
        assert np.concatenate(others) == pytest.approx(np.concatenate(grads), rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("name", [name for name, each in SETTINGS.items() if each.kl != "k3" and each.kl != "k2"])
def test_the_first_update_of_a_batch_is_linear(name):
    """Without old log-probs, and with old ones that are those of the policy, each log-prob has the weight -w A."""
    objective = replace(SETTINGS[name], correction="none")
    replies = _replies()
    policy = [_old(reply) for reply in replies]
    _, grads = _loss(objective, replies, policy)
    for reply in replies:
        del reply.values["old_log_probs"]
    batch = make_rows(replies, PACKED, SEQ_LEN)
    del batch["old_log_probs"]
    log_probs = _place(policy, PACKED, batch).requires_grad_()
    loss = objective.loss(log_probs, batch, objective.count(batch), row_sums)
    [grad] = torch.autograd.grad(loss, log_probs)
    tokens = sum(map(len, policy))
    for at, row in enumerate(PACKED):
        for segment, number in enumerate(row):
            own = grad[at][(batch["labels"][at] >= 0) & (batch["segments"][at] == segment)].numpy()
            assert own == pytest.approx(grads[number], rel=1e-12)
            average = {"tokens": 1 / tokens, "sequences": 1 / COUNT / len(own), "constant": 1 / COUNT / 20}
            share = 1 / COUNT if name == "rloo" else average[objective.average]
            assert own == pytest.approx(-replies[number].values["advantages"] * share, rel=1e-12)


def test_metrics():
    replies = _replies()
    policy = _policy(replies)
    batch = make_rows(replies, PACKED, SEQ_LEN)
    objective = PolicyGradient(kl="k3", beta=0.1, delta=1.4, correction="mask", correction_low=0.8, correction_high=1.2)

    def measure(objective, batch):
        sums = objective.measure(_place(policy, PACKED, batch), batch, row_sums)
        assert sums.shape == (len(objective.metrics), 2)
        return {name: (total / number).item() for name, (total, number) in zip(objective.metrics, sums) if number}

    ours = np.concatenate(policy)
    advantages, old, sampler, reference = (
        np.concatenate([reply.values[name] for reply in replies]) for name in COLUMNS
    )
    ratio, gap, ahead = np.exp(ours - old), reference - ours, old - sampler
    weight = np.exp(ahead)
    expected = {
        "clip/low": np.mean((ratio < 0.8) & (advantages < 0)),
        "clip/high": np.mean(((ratio > 1.28) & (advantages > 0)) | ((ratio > 1.4) & (advantages < 0))),
        "ratio": ratio.mean(),
        "kl": np.mean(np.exp(gap) - gap - 1),
        "mismatch/log_prob": np.abs(ahead).mean(),
        "mismatch/k3": np.mean(weight - ahead - 1),
        "mismatch/ess": 1 / np.mean(weight**2),
        "mismatch/left_out": np.mean((weight < 0.8) | (weight > 1.2)),
    }
    assert all(0 < expected[name] < 1 for name in ("clip/low", "clip/high", "mismatch/ess", "mismatch/left_out"))
    assert measure(objective, batch) == pytest.approx(expected, rel=1e-12)

    del batch["sampler_log_probs"], batch["reference_log_probs"]
    alone = measure(PolicyGradient(clip="cispo", cap=1.1, correction="none"), batch)
    assert alone == pytest.approx({"clip/low": 0, "clip/high": np.mean(ratio > 1.1), "ratio": ratio.mean()})


def test_a_reference_that_the_batch_lacks():
    replies = _replies()
    batch = make_rows(replies, PACKED, SEQ_LEN)
    del batch["reference_log_probs"]
    with pytest.raises(ConfigError, match=r"the batch has no log-probs of one; name a reference model"):
        PolicyGradient(kl="k3", beta=0.1).loss(_place(_policy(replies), PACKED, batch), batch, 9, row_sums)


def test_a_constant_that_is_missing():
    with pytest.raises(ConfigError, match=r"objective\.constant, which is missing: set it to the tokens"):
        POLICY_GRADIENTS["dr_grpo"]().count(make_rows(_replies(), PACKED, SEQ_LEN))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"kl": "k1", "beta": 0.1}, r"kl='k1'.* gradient of zero in expectation.* use 'k3' or 'k2', or 'reward'"),
        ({"kl": "k3"}, r"beta=0 does not go with objective\.kl='k3'"),
        ({"beta": 0.1}, r"beta=0\.1 does not go with objective\.kl='none'"),
        ({"kl": "k2", "beta": -1.0}, r"beta=-1\.0 must be at least 0"),
        ({"kl": "reward", "beta": 0.1, "advantage": "teacher"}, r"no reward from which to subtract"),
        ({"ratio": "none"}, r"clip='ratio' does not go with objective\.ratio='none': there is no ratio to clip"),
        ({"clip": "cispo"}, r"clip='cispo' needs objective\.cap"),
        ({"cap": 5.0}, r"cap=5 has no effect: clip='cispo' has it"),
        ({"clip": "none", "delta": 5.0}, r"delta=5 has no effect"),
        ({"delta": 1.2}, r"delta=1\.2 is below 1 \+ objective\.clip_high=1\.28"),
        ({"ratio": "sequence", "correction": "truncate"}, r"single ratio cannot weight its tokens differently"),
        ({"ratio": "sequence_sum", "correction": "mask", "average": "sequences"}, r"'sequence_mask' or 'none'"),
        ({"ratio": "sequence_sum"}, r"average='tokens' does not go with objective\.ratio='sequence_sum'"),
        ({"constant": 9.0}, r"constant=9 has no effect"),
        ({"correction_low": 0.5}, r"correction_low=0\.5 has no effect"),
        ({"correction": "none", "correction_high": 2.0}, r"correction_high=2 has no effect"),
        ({"correction": "mask", "correction_low": 6.0}, r"correction_low=6 is not below .*=5"),
        ({"average": "token"}, r"average='token' must be one of tokens, sequences, constant"),
        ({"clip_high": -0.1}, r"clip_high=-0\.1 must be above 0"),
        ({"clip_low": 1.5}, r"clip_low=1\.5 must be at most 1"),
    ],
)
def test_refused(options, reason):
    with pytest.raises(ConfigError, match=reason):
        PolicyGradient(**options)


def test_presets_are_settings_of_the_same_options():
    names = [option.name for option in fields(PolicyGradient)]
    for kind in POLICY_GRADIENTS.values():
        assert [option.name for option in fields(kind)] == names
        assert kind.loss is PolicyGradient.loss
    settings = [tuple(getattr(kind(), name) for name in names) for kind in POLICY_GRADIENTS.values()]
    assert len(set(settings)) == len(settings)


REWARDS = np.array([[1.0, 0.0, 0.0, 1.0], [0.5, np.nan, 0.25, 0.0], [np.nan, np.nan, 2.0, np.nan], [1.0] * 4])


@pytest.mark.parametrize("advantage", ["group_std", "group", "batch_std", "leave_one_out", "mean"])
def test_advantages_of_groups(advantage):
    result = group_advantages(REWARDS, advantage)
    every = [reward for reward in REWARDS.ravel() if not np.isnan(reward)]
    for row, group in zip(result, REWARDS, strict=True):
        scored = [reward for reward in group if not np.isnan(reward)]
        mean = sum(scored) / len(scored)
        for value, reward in zip(row, group, strict=True):
            others = (sum(scored) - reward) / (len(scored) - 1) if len(scored) > 1 else reward
            std = np.std(scored, ddof=1) if len(scored) > 1 else 0.0
            expected = {
                "group_std": (reward - mean) / (std + 1e-4),
                "group": reward - mean,
                "batch_std": (reward - mean) / (np.std(every, ddof=1) + 1e-4),
                "leave_one_out": reward - others,
                "mean": (reward - mean) / mean,
            }
            assert value == pytest.approx(0.0 if np.isnan(reward) else expected[advantage], rel=1e-12)


def test_a_group_without_a_score_or_a_success_has_no_advantages():
    for advantage in ("group_std", "group", "batch_std", "leave_one_out", "mean"):
        assert (group_advantages(np.array([[np.nan] * 3, [0.0] * 3]), advantage) == 0).all()


def test_rewards_of_another_sign_have_no_share_of_successes():
    with pytest.raises(ConfigError, match=r"divides by the mean reward of a prompt's replies, but one is -0\.5"):
        group_advantages(np.array([[-1.0, 0.0]]), "mean")


def test_the_divergence_is_subtracted_from_rewards():
    log_probs, reference = np.array([[-3.0, -5.0]]), np.array([[-4.0, -4.5]])
    result = rewards_with_kl(np.array([[1.0, np.nan]]), log_probs, reference, 0.1)
    assert result[0, 0] == pytest.approx(1.0 - 0.1 * 1.0)
    assert np.isnan(result[0, 1])
