"""Preference objectives without a reference model: ORPO, SimPO and CPO.

With L the sum of a side's log-probs over its n trained tokens, m = L / n, and S the logistic function:

    orpo   -m_chosen - b log S(o(m_chosen) - o(m_rejected))    o(m) = m - log(1 - e^m): Hong et al., 2024,
                                                               arXiv:2403.07691, eqs. 4 to 7
    simpo  -log S(b m_chosen - b m_rejected - g)               Meng et al., 2024, arXiv:2405.14734, eq. 6
    cpo    -log S(b (L_chosen - L_rejected)) - a m_chosen      Xu et al., 2024, arXiv:2401.08417

b is `beta`, g is `gamma`, and a is `sft`, which SimPO may add, too. Each loss is the mean over pairs. Only trained
tokens count: a prompt has no part in the negative log-likelihood.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kumi.objectives.options import check_not_negative, check_option, check_positive
from kumi.objectives.preferences import PreferenceObjective, pairs_of, token_means
from kumi.spec.field_docs import described

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class OddsRatio(PreferenceObjective):
    """ORPO, see the module's docstring."""

    beta: float = described("Weight of the log odds ratio beside the chosen side's likelihood.", 0.1)

    usual_lr: ClassVar[float | None] = 5e-6

    def __post_init__(self) -> None:
        check_positive(beta=self.beta)

    def sequence_loss(self, totals: Tensor, batch: Mapping[str, Tensor], units: float) -> Tensor:
        from torch.nn.functional import logsigmoid

        means = token_means(totals, batch)
        odds, pairs = pairs_of(_log_odds(means), batch), pairs_of(means, batch)
        return pairs.sum(-pairs.chosen - self.beta * logsigmoid(odds.chosen - odds.rejected)) / units

    def rewards(self, totals: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        return self.beta * token_means(totals, batch)


@dataclass(frozen=True)
class SimplePreference(PreferenceObjective):
    """SimPO, see the module's docstring."""

    beta: float = described("Factor of a side's mean log-prob.", 2.0)
    gamma: float = described("The margin of rewards that the chosen side should have.", 0.5)
    sft: float = described("Weight of the chosen side's mean negative log-prob, added to each pair's loss.", 0.0)

    usual_lr: ClassVar[float | None] = 5e-7

    def __post_init__(self) -> None:
        check_positive(beta=self.beta)
        check_not_negative(sft=self.sft)
        check_option(math.isfinite(self.gamma), "gamma", self.gamma, "a finite number")

    def sequence_loss(self, totals: Tensor, batch: Mapping[str, Tensor], units: float) -> Tensor:
        from torch.nn.functional import logsigmoid

        pairs = pairs_of(token_means(totals, batch), batch)
        losses = -logsigmoid(self.beta * (pairs.chosen - pairs.rejected) - self.gamma)
        return pairs.sum(losses - self.sft * pairs.chosen) / units

    def rewards(self, totals: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        return self.beta * token_means(totals, batch)


@dataclass(frozen=True)
class ContrastivePreference(PreferenceObjective):
    """CPO, see the module's docstring."""

    beta: float = described("Factor of a side's log-prob.", 0.1)
    sft: float = described("Weight of the chosen side's mean negative log-prob, added to each pair's loss.", 1.0)

    usual_lr: ClassVar[float | None] = 1e-6

    def __post_init__(self) -> None:
        check_positive(beta=self.beta)
        check_not_negative(sft=self.sft)

    def sequence_loss(self, totals: Tensor, batch: Mapping[str, Tensor], units: float) -> Tensor:
        from torch.nn.functional import logsigmoid

        pairs, means = pairs_of(totals, batch), pairs_of(token_means(totals, batch), batch)
        losses = -logsigmoid(self.beta * (pairs.chosen - pairs.rejected))
        return pairs.sum(losses - self.sft * means.chosen) / units

    def rewards(self, totals: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        return self.beta * totals


def _log_odds(means: Tensor) -> Tensor:
    """Return log(p / (1 - p)) for p = e^means, accurate for p near 0 and near 1."""
    import torch

    means = means.clamp(max=-torch.finfo(means.dtype).eps)
    near_zero = torch.log1p(-means.clamp(max=-math.log(2)).exp())
    near_one = torch.log(-torch.expm1(means.clamp(min=-math.log(2))))
    return means - torch.where(means < -math.log(2), near_zero, near_one)
