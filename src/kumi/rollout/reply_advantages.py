"""The advantage of each reply token of a rollout batch, as the objective's options say, and a critic's returns."""

from __future__ import annotations

import numpy as np

from kumi.data.binfile import Array
from kumi.objectives.advantages import group_advantages, rewards_with_kl, teacher_advantages
from kumi.objectives.policy_gradient import PolicyGradient
from kumi.objectives.ppo import gae, moments, token_rewards, whitened
from kumi.rollout.rollout_batch import RolloutBatch, TokenTargets, spread_over_tokens


def token_targets(objective: PolicyGradient, batch: RolloutBatch) -> TokenTargets:
    """Return what the updates with `batch` train each reply token for.

    `batch` must have old log-probs if `objective.needs_old_log_probs`, log-probs of the reference model if
    `objective.reads_reference`, and values if `objective.trains_critic`.
    """
    if objective.trains_critic:
        return _critic_targets(objective, batch)
    return TokenTargets(_advantages(objective, batch))


def _advantages(objective: PolicyGradient, batch: RolloutBatch) -> Array:
    """Return the advantages (tokens,): from a teacher, or from comparing the replies of each group."""
    if objective.advantage == "teacher":
        old, reference = _old_and_reference(batch)
        return np.asarray(teacher_advantages(reference, old))
    rewards = batch.rewards
    if objective.kl == "reward":
        old, reference = (_reply_sums(values, batch) for values in _old_and_reference(batch))
        rewards = rewards_with_kl(rewards, old, reference, objective.beta)
    return spread_over_tokens(group_advantages(rewards, objective.advantage), batch.groups)


def _critic_targets(objective: PolicyGradient, batch: RolloutBatch) -> TokenTargets:
    """Return the generalised advantages, whitened over the trained tokens of `batch`, and the returns.

    All ranks have all replies, so that the mean and the variance are those of the batch on every layout. A reply that
    cannot be scored, or that no update trains, has advantages of 0 and no return, and does not count in mean and
    variance.
    """
    assert batch.values is not None, "the run has a critic"
    lengths = np.array([len(sequence.reply) for sequence in batch.sequences])
    # Arrays below are (replies, tokens of the longest reply); `is_token` is False behind the end of a reply.
    is_token = np.arange(lengths.max()) < lengths[:, None]
    rewards = batch.rewards.ravel()
    is_reply_trained = np.isfinite(rewards)
    is_reply_trained &= np.isin(np.arange(len(lengths)), np.concatenate(batch.trained_sequences))
    trained = is_token & is_reply_trained[:, None]

    def padded(values: Array) -> Array:
        rows = np.zeros(is_token.shape)
        rows[is_token] = values
        return rows

    k1 = np.zeros(is_token.shape)
    if objective.kl == "reward":
        old, reference = _old_and_reference(batch)
        k1 = padded(old - reference)
    rewards_of_tokens = token_rewards(rewards, k1, trained, objective.beta)
    advantages, returns = gae(rewards_of_tokens, padded(batch.values), trained, *objective.discounts)
    white = whitened(advantages, trained, moments(advantages, trained))
    return TokenTargets(white[is_token], np.where(trained, returns, np.nan)[is_token])


def _old_and_reference(batch: RolloutBatch) -> tuple[Array, Array]:
    """Return the log-probs of all reply tokens by the policy before the updates, and by the reference model."""
    assert batch.old is not None, "the objective needs old log-probs"
    assert batch.reference is not None, "the objective has a reference"
    return batch.old, batch.reference


def _reply_sums(values: Array, batch: RolloutBatch) -> Array:
    """Return the sums of `values` (tokens,) over the tokens of each reply, (groups, replies)."""
    firsts = [sequence.first for sequence in batch.sequences]
    return np.asarray(np.add.reduceat(values, firsts).reshape(batch.rewards.shape))
