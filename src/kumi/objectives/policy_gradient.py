"""Policy gradients: one loss with switches. GRPO, DAPO, RLOO and their relatives are settings of it.

For each trained token, l is its log-prob by the policy, o by the policy that began the batch ("old"), s by the sampler
that drew it, r by the reference model, and A its advantage. Sums and means of a reply are over its trained tokens, and
sg() stops the gradient. A token's loss is w policy + beta KL:

    ratio    token          p = e^(l - o)                          PPO: Schulman et al., 2017, arXiv:1707.06347
             sequence       p = e^(mean of l - o over the reply)   GSPO: Zheng et al., 2025, arXiv:2507.18071
             sequence_sum   p = e^(sum of l - o over the reply)    RLOO: Ahmadian et al., 2024, arXiv:2402.14740
             none           p = 1, with the gradient of l          REINFORCE: Williams, 1992
    policy   clip = ratio   -min(p A, clip(p, 1 - low, 1 + high) A)
             with delta     -min(min(p, delta) A, clip(p, 1 - low, 1 + high) A)    Ye et al., 2020, arXiv:1912.09729
             clip = cispo   -sg(min(p, cap)) A l                                   MiniMax, 2025, arXiv:2506.13585
             clip = none    -p A
    KL       k2             (l - r)^2 / 2                          Schulman, "Approximating KL divergence", 2020
             k3             e^(l - o) (e^(r - l) - (r - l) - 1)    DeepSeek-AI, 2025, arXiv:2512.02556, sec. 3.1
             reward         no term: it is in the rewards, see `kumi.objectives.advantages`
    w        truncate       min(e^(o - s), high)                   Yao et al., 2025, "Your efficient RL framework
                                                                   secretly brings you off-policy RL training"
             mask           e^(o - s) within [low, high], else 0   Ling team, 2025, arXiv:2510.18855
             sequence_mask  e^(sum of o - s over the reply) within [low, high], else 0

`average` makes the loss of a step: the mean over its tokens (DAPO: Yu et al., 2025, arXiv:2503.14476), the mean over
replies of their means (GRPO: Shao et al., 2024, arXiv:2402.03300), or the mean over replies of their sums divided by a
constant (Dr. GRPO: Liu et al., 2025, arXiv:2503.20783).

`delta` is both the two-sided clip of some trainers and the dual clip of others: they are one formula. `negative_limit`
also makes w = 0 for replies with A < 0 and a mean of s - l above it (DeepSeek-AI, 2025, arXiv:2512.02556, sec. 3.1).

Terms of KL(policy || reference). On samples of the policy, k1 = l - r in the loss has the gradient E[grad l] = 0, and
is refused. k2, and k3 with the ratio e^(l - o), have the gradient of each token's divergence, with the distribution of
prefixes held fixed. k1 in the reward has exactly the gradient of the sequence's divergence. k3 without the ratio has
neither gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from kumi.errors import ConfigError
from kumi.objectives.objective import IGNORED, SegmentSums, TokenObjective
from kumi.objectives.policy_options import PolicyOptions
from kumi.objectives.row_form import ROLLOUTS, RowForm

if TYPE_CHECKING:
    from torch import Tensor

# The largest |r - l| of a KL term. A token that the reference model excludes must not end the run.
_LARGEST_GAP = 20.0


class PolicyTokens(NamedTuple):
    """The quantities of the tokens of a batch, each (B, S) float64.

    mask: 1.0 for trained tokens, else 0.0.
    log_probs, old, ratio: l, o and p of the module's docstring; 0, 0 and 1 for tokens that are not trained.
    weights: w of the module's docstring, without a gradient.
    """

    mask: Tensor
    log_probs: Tensor
    old: Tensor
    ratio: Tensor
    weights: Tensor


@dataclass(frozen=True)
class PolicyGradient(PolicyOptions, TokenObjective):
    """The loss that the module's docstring describes, on rows of replies.

    Columns of a batch, 0 at tokens that are not trained:

    advantages (B, S): A. All tokens of a reply have the same, unless a teacher or a critic gives each its own.
    old_log_probs (B, S): o. Missing in the first update with a batch: o is then l, without a gradient.
    sampler_log_probs (B, S): s. Only corrections read it.
    reference_log_probs (B, S): r. Only terms of the KL divergence read it.
    segments (B, S), trained (B, G): see `SequenceObjective`.

    With a single update for each batch and no KL term, no ratio differs from 1 and the loss is linear: each l has the
    weight -w A / units, divided by the length of its reply if average = "sequences". With correction = "none" and no
    `negative_limit`, w is 1. The weights are then known before the forward pass, and a `LinearObjective` with them,
    whose output head computes its gradient in the forward pass, has the same gradient.
    """

    rows: ClassVar[RowForm] = ROLLOUTS
    unit: ClassVar[str] = "replies"
    usual_lr: ClassVar[float | None] = 1e-6
    columns: ClassVar[Mapping[str, Literal["token", "row"]]] = {
        "advantages": "token",
        "old_log_probs": "token",
        "sampler_log_probs": "token",
        "reference_log_probs": "token",
        "segments": "token",
        "trained": "row",
    }
    metrics: ClassVar[tuple[str, ...]] = (
        "clip/low",
        "clip/high",
        "ratio",
        "kl",
        "mismatch/log_prob",
        "mismatch/k3",
        "mismatch/ess",
        "mismatch/left_out",
    )

    @property
    def reads_reference(self) -> bool:
        """True for a divergence from a reference model, and for a teacher, which takes the reference model's place."""
        return self.has_kl or self.advantage == "teacher"

    @property
    def needs_old_log_probs(self) -> bool:
        """True if advantages depend on the log-probs of the policy that began the batch; see `Objective`."""
        return self.advantage == "teacher" or self.kl == "reward"

    @property
    def trains_critic(self) -> bool:
        return self.advantage == "gae"

    def count(self, batch: Mapping[str, Any]) -> float:
        """Return the number of units in `batch`, by `average`: trained tokens, replies, or replies times `constant`."""
        if self.average == "tokens":
            return self.tokens(batch)
        replies = int((batch["trained"] > 0).sum())
        if self.average == "sequences":
            return replies
        if self.constant is None:
            raise ConfigError(
                "objective.average='constant' divides the sums of replies by objective.constant, which is missing: "
                "set it to the tokens of the longest reply allowed"
            )
        return replies * self.constant

    def loss(self, log_probs: Tensor, batch: Mapping[str, Tensor], units: float, sums: SegmentSums) -> Tensor:
        tokens = self._tokens(log_probs, batch, sums)
        losses = tokens.weights * self._policy_losses(tokens, batch["advantages"])
        if self.kl in ("k2", "k3"):
            losses = losses + self.beta * self._kl_terms(tokens, batch)
        losses = losses * tokens.mask
        if self.average == "sequences":
            losses = losses / batch["trained"].clamp(min=1).gather(1, batch["segments"])
        return (_totals(losses[None], sums).sum() / units).to(log_probs.dtype)

    def _policy_losses(self, tokens: PolicyTokens, advantages: Tensor) -> Tensor:
        """Return the policy term of each token, (B, S)."""
        import torch

        ratio = tokens.ratio
        if self.clip == "cispo":
            return -ratio.detach().clamp(max=self.cap) * advantages * tokens.log_probs
        if self.clip == "none":
            return -ratio * advantages
        bounded = ratio if self.delta is None else ratio.clamp(max=self.delta)
        clipped = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        return -torch.minimum(bounded * advantages, clipped * advantages)

    def _kl_terms(self, tokens: PolicyTokens, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the KL term of each token, (B, S)."""
        gap = _reference_gap(tokens, batch)
        if self.kl == "k2":
            return gap.square() / 2
        return (tokens.log_probs - tokens.old).exp() * (gap.exp() - gap - 1)

    def _tokens(self, log_probs: Tensor, batch: Mapping[str, Tensor], sums: SegmentSums) -> PolicyTokens:
        """Return the quantities of all tokens, given the log-probs (B, S) of the labels.

        Every token's ratio has the gradient of its own log-prob, so that sharded rows need no gradient of another
        rank's tokens. The sum of the gradients over a reply is that of the reply's ratio, counted once for each token.
        """
        mask = (batch["labels"] != IGNORED).double()
        now = log_probs.double()
        before = batch["old_log_probs"].double() if "old_log_probs" in batch else now.detach()
        gap = now - before
        if self.ratio == "none":
            gap = now - now.detach()
        elif self.has_sequence_ratio:
            lengths = batch["trained"].clamp(min=1).gather(1, batch["segments"])
            total = _reply_sums(gap.detach(), batch, sums)
            own = now - now.detach()
            gap = total / lengths + own if self.ratio == "sequence" else total + lengths * own
        return PolicyTokens(mask, now, before, gap.exp(), self._weights(now.detach(), before, batch, sums))

    def _weights(self, now: Tensor, before: Tensor, batch: Mapping[str, Tensor], sums: SegmentSums) -> Tensor:
        """Return the weight of each token's policy term, (B, S), given l and o without gradients."""
        if self.weighting == "none" and self.negative_limit is None:
            return before.new_ones(())
        sampler, (low, high) = batch["sampler_log_probs"].double(), self.bounds
        gap = before - sampler
        weights = (_reply_sums(gap, batch, sums) if self.weighting == "sequence_mask" else gap).exp()
        if self.weighting == "none":
            weights = weights.new_ones(weights.shape)
        elif self.weighting == "truncate":
            weights = weights.clamp(max=high)
        else:
            weights = weights * ((weights >= low) & (weights <= high))
        if self.negative_limit is not None:
            lengths = batch["trained"].clamp(min=1).gather(1, batch["segments"])
            behind = _reply_sums(sampler - now, batch, sums) / lengths
            weights = weights * ~((batch["advantages"] < 0) & (behind > self.negative_limit))
        return weights

    def measure(self, log_probs: Tensor, batch: Mapping[str, Tensor], sums: SegmentSums) -> Tensor:
        """Return for each of `metrics` its numerator and its denominator, sums over trained tokens, (metrics, 2):

        clip/low, clip/high: whether the ratio is clipped at its lower bound, or at its upper bound or the cap.
        ratio: p. kl: k3 without its ratio, the divergence from the reference model.
        mismatch/log_prob: |o - s|. mismatch/k3: e^(o - s) - (o - s) - 1, the divergence of the trainer's policy from
        the sampler's. mismatch/ess: 1 / mean of e^(2 (o - s)), the share of the tokens that remains as the effective
        sample size. mismatch/left_out: whether w is 0.
        """
        import torch

        tokens = self._tokens(log_probs.detach(), batch, sums)
        mask = tokens.mask
        low, high = self._clipped(tokens.ratio, batch["advantages"])
        nothing = torch.zeros_like(mask)
        # Masks of the trained tokens that have log-probs of the reference model, and of the sampler.
        reference_mask = mask if "reference_log_probs" in batch else nothing
        sampler_mask = mask if "sampler_log_probs" in batch else nothing
        gap = _reference_gap(tokens, batch) if "reference_log_probs" in batch else nothing
        mismatch = tokens.old - batch["sampler_log_probs"] if "sampler_log_probs" in batch else nothing
        clip_mask = nothing if self.clip == "none" else mask
        table = [
            (low * clip_mask, clip_mask),
            (high * clip_mask, clip_mask),
            (tokens.ratio * mask, mask),
            ((gap.exp() - gap - 1) * reference_mask, reference_mask),
            (mismatch.abs() * sampler_mask, sampler_mask),
            ((mismatch.exp() - mismatch - 1) * sampler_mask, sampler_mask),
            (sampler_mask, (2 * mismatch).exp() * sampler_mask),
            ((tokens.weights == 0) * sampler_mask, sampler_mask),
        ]
        return _totals(torch.stack([column for pair in table for column in pair]), sums).view(-1, 2)

    def _clipped(self, ratio: Tensor, advantages: Tensor) -> tuple[Tensor, Tensor]:
        """Return True for tokens whose ratio is clipped at the lower bound, and at an upper bound, each (B, S)."""
        if self.cap is not None:
            return ratio < 0, ratio > self.cap  # there is no lower bound, and no ratio is below 0
        low = (ratio < 1 - self.clip_low) & (advantages < 0)
        high = (ratio > 1 + self.clip_high) & (advantages > 0)
        return low, high if self.delta is None else high | ((ratio > self.delta) & (advantages < 0))


def _reference_gap(tokens: PolicyTokens, batch: Mapping[str, Tensor]) -> Tensor:
    """Return r - l of each token, (B, S), within `_LARGEST_GAP`. Raise ConfigError without a reference model."""
    if "reference_log_probs" not in batch:
        raise ConfigError(
            "objective.kl compares the policy with a reference model, but the batch has no log-probs of one; name a "
            "reference model, or set objective.kl = 'none' and objective.beta = 0"
        )
    return (batch["reference_log_probs"].double() - tokens.log_probs).clamp(-_LARGEST_GAP, _LARGEST_GAP)


def _reply_sums(values: Tensor, batch: Mapping[str, Tensor], sums: SegmentSums) -> Tensor:
    """Return for each token the sum of `values` (B, S) over its reply, (B, S)."""
    return sums(values, batch["segments"], batch["trained"].shape[1]).gather(1, batch["segments"])


def _totals(values: Tensor, sums: SegmentSums) -> Tensor:
    """Return the sums (K,) of `values` (K, B, S) over complete rows."""
    import torch

    rows = values.flatten(0, 1)
    whole: Tensor = sums(rows, torch.zeros_like(rows, dtype=torch.int64), 1)
    return whole.view(len(values), -1).sum(1)
