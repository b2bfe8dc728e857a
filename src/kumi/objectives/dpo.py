"""Direct preference optimisation and its variants: a pair's loss is a function of its advantage over the reference.

A pair has a chosen and a rejected side. With L and R the sums of log-probs by the policy and by the reference over the
trained tokens of a side, or their means:

    h = (L_chosen - R_chosen) - (L_rejected - R_rejected)

    sigmoid    -log S(b h - margin)                             Rafailov et al., 2023, arXiv:2305.18290, eq. 7
    cdpo       -(1 - e) log S(b h) - e log S(-b h)              Mitchell, "A note on DPO with noisy preferences", 2023
    robust     (-(1 - e) log S(b h) + e log S(-b h)) / (1 - 2e) Chowdhury et al., 2024, arXiv:2403.00409
    hinge      max(0, 1 - b h)                                  Zhao et al., 2023, arXiv:2305.10425
    ipo        (h - 1 / (2 b))^2                                Azar et al., 2023, arXiv:2310.12036, eq. 17
    apo_zero   1 - S(b (L_c - R_c)) + S(b (L_r - R_r))          D'Oosterlinck et al., 2024, arXiv:2408.06266, eq. 7
    apo_down   S(b (L_c - R_c)) + 1 - S(b h)                    the same, eq. 8

S is the logistic function, b is `beta`, and e is `label_smoothing`; c and r are short for chosen and rejected. With
`length` = "mean", sigmoid is the length-normalised DPO of Tulu 3 (arXiv:2411.15124, eq. 6). The margin is from ODPO
(arXiv:2402.10571), the `sft` term from iterative RPO (arXiv:2404.19733, eq. 1).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kumi.errors import ConfigError
from kumi.objectives.options import check_not_negative, check_option, check_positive
from kumi.objectives.preferences import Pairs, PreferenceObjective, pairs_of, token_means
from kumi.spec.field_docs import described

if TYPE_CHECKING:
    from torch import Tensor

DPO_LOSSES = ("sigmoid", "cdpo", "robust", "hinge", "ipo", "apo_zero", "apo_down")
LENGTHS = ("sum", "mean")


@dataclass(frozen=True)
class DirectPreference(PreferenceObjective):
    """DPO, cDPO, robust DPO, hinge, IPO and APO: the losses in the module's docstring."""

    loss_type: str = described("The function of a pair's advantage over the reference.", "sigmoid", DPO_LOSSES)
    beta: float = described("Factor of log-probs; a larger one keeps the policy nearer to the reference.", 0.1)
    length: str | None = described(
        "Log-probs of a side are the 'sum' or the 'mean' over its tokens; by default the mean for ipo, else the sum.",
        None,
        LENGTHS,
    )
    label_smoothing: float = described("Share of pairs taken to be the wrong way round, of cdpo and robust.", 0.0)
    sft: float = described("Weight of the chosen side's mean negative log-prob, added to each pair's loss.", 0.0)
    margin: float = described("Factor of the column `margin` of the rows, subtracted by sigmoid.", 0.0)

    reference: ClassVar[bool] = True
    usual_lr: ClassVar[float | None] = 5e-7

    def __post_init__(self) -> None:
        check_option(self.loss_type in DPO_LOSSES, "loss_type", self.loss_type, f"one of {', '.join(DPO_LOSSES)}")
        check_option(self.length in (None, *LENGTHS), "length", self.length, "'sum' or 'mean'")
        check_positive(beta=self.beta)
        check_not_negative(sft=self.sft, margin=self.margin)
        smoothing = self.label_smoothing
        check_option(0 <= smoothing < 0.5, "label_smoothing", smoothing, "at least 0 and below 0.5")
        uses_smoothing = self.loss_type in ("cdpo", "robust")
        if uses_smoothing != (self.label_smoothing > 0):
            raise ConfigError(
                f"objective.label_smoothing={self.label_smoothing:g} does not go with "
                f"objective.loss_type={self.loss_type!r}: cdpo and robust need it above 0, and no other loss uses it"
            )
        if self.margin and self.loss_type != "sigmoid":
            raise ConfigError(
                f"objective.margin={self.margin:g} does not go with objective.loss_type={self.loss_type!r}: only "
                "sigmoid subtracts margins"
            )

    @property
    def averages_tokens(self) -> bool:
        """Return True if the log-probs of a side are means over its tokens, False if they are sums."""
        return self.length == "mean" or (self.length is None and self.loss_type == "ipo")

    def sequence_loss(self, totals: Tensor, batch: Mapping[str, Tensor], units: float) -> Tensor:
        pairs = pairs_of(self._ahead(totals, batch), batch)
        losses = self._losses(pairs, batch)
        if self.sft:
            losses = losses - self.sft * pairs_of(token_means(totals, batch), batch).chosen
        return pairs.sum(losses) / units

    def rewards(self, totals: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        return self.beta * self._ahead(totals, batch)

    def _ahead(self, totals: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Return L - R of each sequence, (B, G)."""
        ahead = totals - batch["reference"]
        return token_means(ahead, batch) if self.averages_tokens else ahead

    def _losses(self, pairs: Pairs, batch: Mapping[str, Tensor]) -> Tensor:
        from torch.nn.functional import logsigmoid

        scaled = self.beta * (pairs.chosen - pairs.rejected)
        match self.loss_type:
            case "sigmoid":
                return -logsigmoid(scaled - self.margin * batch["margins"] if self.margin else scaled)
            case "cdpo":
                return -(1 - self.label_smoothing) * logsigmoid(scaled) - self.label_smoothing * logsigmoid(-scaled)
            case "robust":
                noise = self.label_smoothing
                return (noise * logsigmoid(-scaled) - (1 - noise) * logsigmoid(scaled)) / (1 - 2 * noise)
            case "hinge":
                return (1 - scaled).relu()
            case "ipo":
                return (pairs.chosen - pairs.rejected - 1 / (2 * self.beta)) ** 2
            case "apo_zero":
                return 1 - (self.beta * pairs.chosen).sigmoid() + (self.beta * pairs.rejected).sigmoid()
        assert self.loss_type == "apo_down"
        return (self.beta * pairs.chosen).sigmoid() + 1 - scaled.sigmoid()
