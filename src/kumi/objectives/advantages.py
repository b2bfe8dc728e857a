"""Advantages of groups of replies to the same prompt, in float64.

Rewards are (P, n), for all P prompts of a step with n replies each. NaN is the reward of a reply that could not be
scored: its advantage is 0, and it does not count in means and standard deviations.

    group_std      (R - mean) / (std + 1e-4)     Shao et al., 2024, arXiv:2402.03300
    group          R - mean                      Liu et al., 2025, arXiv:2503.20783
    batch_std      (R - mean) / (std of all rewards + 1e-4)
    leave_one_out  R - mean of the others        Ahmadian et al., 2024, arXiv:2402.14740
    mean           (R - mean) / mean             Tajwar et al., 2026, arXiv:2602.02710

R is the reward of a reply; mean and std, where nothing else is said, are the mean and the standard deviation of its
group. Standard deviations have n - 1 in the denominator, as in TRL.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kumi.errors import ConfigError

Array: TypeAlias = NDArray[np.float64]
# Added to standard deviations, as in TRL.
_STD_EPS = 1e-4


def group_advantages(rewards: Array, advantage: str) -> Array:
    """Return the advantages (P, n) of `rewards` (P, n), by the formula with the name `advantage` above.

    Raise ConfigError for "mean" if the mean of a group is below 0.
    """
    rewards = np.asarray(rewards, np.float64)
    scored = np.isfinite(rewards)
    counts = scored.sum(1, keepdims=True)
    means: Array = np.where(scored, rewards, 0.0).sum(1, keepdims=True) / np.maximum(counts, 1)
    ahead: Array = np.where(scored, rewards - means, 0.0)
    match advantage:
        case "group":
            return ahead
        case "group_std":
            return ahead / (_std(ahead, counts) + _STD_EPS)
        case "batch_std":
            return ahead / (_batch_std(rewards[scored]) + _STD_EPS)
        case "leave_one_out":
            # R - mean of the others = n / (n - 1) (R - mean): a reply without others has the advantage 0.
            result: Array = ahead * counts / np.maximum(counts - 1, 1)
            return result
    assert advantage == "mean", advantage
    if (means < 0).any():
        raise ConfigError(
            f"objective.advantage='mean' divides by the mean reward of a prompt's replies, but one is {means.min():g}: "
            "the sign of its advantages would change; use rewards of at least 0, or 'group_std'"
        )
    return np.divide(ahead, means, out=np.zeros_like(ahead), where=means > 0)


def rewards_with_kl(rewards: Array, log_probs: Array, reference: Array, beta: float) -> Array:
    """Return `rewards` minus `beta` times k1, each (P, n).

    `log_probs`, `reference`: each reply's sum of the log-probs of its tokens, by the policy that began the batch and by
    the reference model. Their difference is k1, whose mean is KL(policy || reference) of complete replies.
    """
    return rewards - beta * (log_probs - reference)


def teacher_advantages(teacher: Array, log_probs: Array) -> Array:
    """Return the advantage of each token for on-policy distillation: its log-prob by the teacher minus that by the
    policy that began the batch."""
    return teacher - log_probs


def _std(ahead: Array, counts: NDArray[np.int64]) -> Array:
    """Return the standard deviation (P, 1) of each group of `counts` replies; 0 for a single reply.

    `ahead`: the rewards minus the mean of their group, (P, n).
    """
    variance: Array = (ahead**2).sum(1, keepdims=True) / np.maximum(counts - 1, 1)
    return np.sqrt(variance)


def _batch_std(scored: Array) -> float:
    """Return the standard deviation of all rewards `scored`; 0 for a single one."""
    return float(scored.std(ddof=1)) if len(scored) > 1 else 0.0
