"""PPO with a critic (Schulman et al., 2017, arXiv:1707.06347): rewards, advantages and returns of tokens.

A critic is a second model with a score head, whose score at a token is the value V_t of the state before the label of
that token. With r_t the reward of a token, t + 1 the next trained token of the reply, and V = A = 0 after the last one:

    d_t       = r_t + gamma V_(t+1) - V_t
    A_t       = d_t + gamma lambda A_(t+1)          Schulman et al., 2016, arXiv:1506.02438, eq. 16
    return_t  = A_t + V_t

The reward of a reply is given at its last token, and every token has the reward -beta k1 for the divergence from the
reference model (Ziegler et al., 2019, arXiv:1909.08593, eq. 2). Tokens that are not trained, such as observations
between two turns and padding at the end, are no steps: the recursion goes from the trained token after them directly to
the one before them.

The loss of the policy is `PolicyGradient(advantage="gae")` on whitened advantages, that of the critic `ValueLoss`. A
reply that could not be scored has no returns, and no loss.
Arrays are (N, T), a row for each reply, in float64.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kumi.objectives.advantages import Array
from kumi.objectives.objective import IGNORED, SegmentSums, TokenObjective
from kumi.objectives.options import check_positive

if TYPE_CHECKING:
    from torch import Tensor

Mask: TypeAlias = NDArray[np.bool_]
# Added to the variance, which is 0 if all advantages are equal.
_VARIANCE_EPS = 1e-8


def token_rewards(rewards: Array, k1: Array, trained: Mask, beta: float) -> Array:
    """Return the rewards (N, T) of tokens: -`beta` k1 each, and the reward (N,) of the reply at its last trained token.

    `k1` (N, T): log-probs by the policy that began the batch minus those by the reference model.
    """
    result = np.where(trained, -beta * k1, 0.0)
    replies = np.flatnonzero(trained.any(1))
    last = trained.shape[1] - 1 - trained[replies, ::-1].argmax(1)
    result[replies, last] += rewards[replies]
    return result


def gae(rewards: Array, values: Array, trained: Mask, gamma: float, lam: float) -> tuple[Array, Array]:
    """Return the advantages and the returns (N, T) of trained tokens, 0 elsewhere, given `rewards` and `values`."""
    advantages = np.zeros_like(values)
    next_value = next_advantage = np.zeros(len(values))
    for at in reversed(range(values.shape[1])):
        here = trained[:, at]
        delta = rewards[:, at] + gamma * next_value - values[:, at]
        next_advantage = np.where(here, delta + gamma * lam * next_advantage, next_advantage)
        next_value = np.where(here, values[:, at], next_value)
        advantages[:, at] = np.where(here, next_advantage, 0.0)
    return advantages, np.where(trained, advantages + values, 0.0)


def moments(advantages: Array, trained: Mask) -> Array:
    """Return the number of trained tokens, the sum of their advantages and the sum of the squares, (3,).

    The moments of a step are the sum of those of its ranks.
    """
    chosen = advantages[trained]
    return np.array([len(chosen), chosen.sum(), (chosen**2).sum()], np.float64)


def whitened(advantages: Array, trained: Mask, step_moments: Array) -> Array:
    """Return `advantages`, scaled to mean 0 and variance 1 over the trained tokens of the step, 0 at other tokens.

    `step_moments`: the `moments` of the step.
    The variance has n - 1 in the denominator. A step of a single token keeps its advantage.
    """
    count, total, squares = step_moments
    if count < 2:
        return advantages
    mean = total / count
    variance = max(squares - count * mean**2, 0.0) / (count - 1)
    return np.where(trained, (advantages - mean) / np.sqrt(variance + _VARIANCE_EPS), 0.0)


def explained_variance(values: Array, returns: Array) -> float:
    """Return the share of the variance of `returns` (n,) that `values` (n,) explain; nan if the returns are equal.

    It is 1 for a perfect critic, 0 for one that predicts the mean, and negative for a worse one.
    """
    variance = returns.var() if len(returns) else 0.0
    return float(1 - (returns - values).var() / variance) if variance > 0 else float("nan")


@dataclass(frozen=True)
class ValueLoss(TokenObjective):
    """The loss of a critic, the mean over trained tokens of

        max((V - return)^2, (clip(V, old V - c, old V + c) - return)^2) / 2

    so that a value that moved too far in the right direction has no gradient. Without a clip, (V - return)^2 / 2.

    Columns, 0 at tokens that are not trained: returns (B, S), nan in replies without one, and old_values (B, S), the
    values with which the returns were computed. The argument `log_probs` of the methods has values, not log-probs: a
    score head gives a value at each label. `value_clip`: c; None for no clip.
    """

    value_clip: float | None = 0.2

    head: ClassVar[Literal["lm", "score"]] = "score"
    columns: ClassVar[Mapping[str, Literal["token", "row"]]] = {"returns": "token", "old_values": "token"}
    metrics: ClassVar[tuple[str, ...]] = ("clipped",)

    def __post_init__(self) -> None:
        if self.value_clip is not None:
            check_positive(value_clip=self.value_clip)

    def count(self, batch: Mapping[str, Any]) -> float:
        """Return the number of trained tokens in `batch` that have a return."""
        labels, returns = np.asarray(batch["labels"]), np.asarray(batch["returns"])
        return int(((labels != IGNORED) & np.isfinite(returns)).sum())

    def loss(self, log_probs: Tensor, batch: Mapping[str, Tensor], units: float, sums: SegmentSums) -> Tensor:
        import torch

        plain, clipped, trained = self._squares(log_probs, batch)
        losses = torch.maximum(plain, clipped) * trained / 2
        rows = sums(losses, torch.zeros_like(batch["labels"]), 1)
        return (rows.sum() / units).to(log_probs.dtype)

    def measure(self, log_probs: Tensor, batch: Mapping[str, Tensor], sums: SegmentSums) -> Tensor:
        """Return the number of trained tokens whose value moved so far that it has no gradient ("clipped"), and the
        number of all trained tokens, (1, 2)."""
        import torch

        plain, clipped, trained = self._squares(log_probs, batch)
        zeros = torch.zeros_like(batch["labels"])
        totals = [sums(column, zeros, 1).sum() for column in ((clipped > plain) * trained, trained)]
        return torch.stack(totals)[None]

    def _squares(self, values: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return (V - return)^2, (clipped V - return)^2, and 1.0 for trained tokens, else 0.0, (B, S) float64."""
        import torch

        values, returns, old = values.double(), batch["returns"].double(), batch["old_values"].double()
        trained = (batch["labels"] != IGNORED) & returns.isfinite()
        returns = returns.nan_to_num()
        near = values if self.value_clip is None else torch.clamp(values, old - self.value_clip, old + self.value_clip)
        return (values - returns).square(), (near - returns).square(), trained.double()
