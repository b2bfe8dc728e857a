"""The advantage of each reply token of a rollout batch, as the objective's options say."""

from __future__ import annotations

import numpy as np

from kumi.data.binfile import Array
from kumi.objectives.advantages import group_advantages, rewards_with_kl, teacher_advantages
from kumi.objectives.policy_gradient import PolicyGradient
from kumi.rollout.rollout_batch import RolloutBatch, spread_over_tokens


def token_advantages(objective: PolicyGradient, batch: RolloutBatch) -> Array:
    """Return the advantage of each reply token of `batch`, float64 (tokens,).

    `batch` has old log-probs if the objective's `needs_old_log_probs`, and those of the reference if it reads them.
    """
    if objective.advantage == "teacher":
        assert batch.reference is not None, "the reference model is the teacher"
        assert batch.old is not None, "the objective needs old log-probs"
        return np.asarray(teacher_advantages(batch.reference, batch.old))
    rewards = batch.rewards
    if objective.kl == "reward":
        assert batch.reference is not None, "the objective has a reference"
        assert batch.old is not None, "the objective needs old log-probs"
        old, reference = _reply_sums(batch.old, batch), _reply_sums(batch.reference, batch)
        rewards = rewards_with_kl(rewards, old, reference, objective.beta)
    return spread_over_tokens(group_advantages(rewards, objective.advantage), batch.groups)


def _reply_sums(values: Array, batch: RolloutBatch) -> Array:
    """Return the sums of `values` (tokens,) over the tokens of each reply, (groups, replies)."""
    firsts = [sequence.first for sequence in batch.sequences]
    return np.asarray(np.add.reduceat(values, firsts).reshape(batch.rewards.shape))
