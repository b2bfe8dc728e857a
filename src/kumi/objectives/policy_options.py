"""The switches of policy gradients, and the combinations that are refused: see `kumi.objectives.policy_gradient`."""

from __future__ import annotations

from dataclasses import dataclass, fields

from kumi.errors import ConfigError
from kumi.objectives.options import check_not_negative, check_option, check_positive
from kumi.spec.field_docs import described

# Advantages that differ between the tokens of a reply; the others compare the replies to a prompt.
TOKEN_ADVANTAGES = ("teacher", "gae")
ADVANTAGES = ("group_std", "group", "batch_std", "leave_one_out", "mean", *TOKEN_ADVANTAGES)
RATIOS = ("token", "sequence", "sequence_sum", "none")
CLIPS = ("ratio", "cispo", "none")
AVERAGES = ("tokens", "sequences", "constant")
KL_CHOICES = ("none", "reward", "k1", "k2", "k3")
CORRECTIONS = ("none", "truncate", "mask", "sequence_mask")
# The default bounds of the weights of each correction; see `correction_low` and `correction_high`.
_BOUNDS = {"none": (1.0, 1.0), "truncate": (0.0, 2.0), "mask": (0.5, 5.0), "sequence_mask": (0.0, 3.0)}


@dataclass(frozen=True)
class PolicyOptions:
    """The switches of a policy gradient. Raise ConfigError for values that contradict each other."""

    advantage: str = described(
        "How the rewards of a group of replies become advantages: the reward minus the mean of the group, divided by "
        "the standard deviation of the group ('group_std') or of all rewards of the step ('batch_std'), by the mean "
        "('mean'), or by nothing ('group'); 'leave_one_out' is the reward minus the mean of the others. For each "
        "token, 'teacher' is a teacher's log-prob minus the policy's, and 'gae' follows from the values of a critic.",
        "group_std",
        ADVANTAGES,
    )
    ratio: str = described(
        "The probability by the policy over that by the policy that began the batch: of a 'token'; of a 'sequence', "
        "the geometric mean over its tokens; 'sequence_sum', the product over its tokens; or 'none'.",
        "token",
        RATIOS,
    )
    clip: str = described(
        "'ratio' clips the ratio as PPO does; 'cispo' caps it, and uses it as a weight without a gradient.",
        "ratio",
        CLIPS,
    )
    clip_low: float = described("clip = 'ratio' clips below 1 minus this.", 0.2)
    clip_high: float = described("clip = 'ratio' clips above 1 plus this.", 0.28)
    delta: float | None = described(
        "The largest ratio of tokens with a negative advantage, to which clip = 'ratio' sets no bound by itself.", None
    )
    cap: float | None = described("The largest weight of clip = 'cispo'.", None)
    average: str = described(
        "The loss is the mean over the 'tokens' of a step, over 'sequences' of the means over their tokens, or over "
        "sequences of the sums over their tokens divided by a 'constant'.",
        "tokens",
        AVERAGES,
    )
    constant: float | None = described(
        "The number by which average = 'constant' divides; by default the tokens of the longest reply allowed.", None
    )
    kl: str = described(
        "How the divergence from a reference model enters: the terms 'k2' or 'k3' of the loss, or a part of the "
        "'reward'. 'k1' in the loss is refused, because its gradient is zero in expectation.",
        "none",
        KL_CHOICES,
    )
    beta: float = described("The weight of the divergence from the reference model.", 0.0)
    correction: str | None = described(
        "Weights for the difference between the sampler's log-probs and the trainer's: 'truncate' and 'mask' for each "
        "token, 'sequence_mask' for each reply; by default 'truncate', for ratios of sequences 'sequence_mask'.",
        None,
        CORRECTIONS,
    )
    correction_low: float | None = described(
        "Weights below it become 0: by default 0.5 for 'mask', and 0 for 'sequence_mask'.", None
    )
    correction_high: float | None = described(
        "Weights above it become this number for 'truncate' (by default 2), and 0 for 'mask' (5) and 'sequence_mask' "
        "(3).",
        None,
    )
    negative_limit: float | None = described(
        "Replies with a negative advantage are left out if their tokens' mean log-prob by the sampler is higher by "
        "more than this than by the policy.",
        None,
    )
    gamma: float | None = described(
        "advantage = 'gae' discounts the rewards of later tokens by this; by default 1.", None
    )
    gae_lambda: float | None = described(
        "advantage = 'gae' discounts what later tokens add to an advantage by this: 0 trusts the critic, 1 the "
        "rewards; by default 0.95.",
        None,
    )

    def __post_init__(self) -> None:
        for option in fields(PolicyOptions):
            value, choices = getattr(self, option.name), option.metadata["choices"]
            if choices:
                check_option(value is None or value in choices, option.name, value, f"one of {', '.join(choices)}")
            elif value is not None and option.name in ("beta", "correction_low", "negative_limit", "gae_lambda"):
                check_not_negative(**{option.name: value})
            elif value is not None:
                check_positive(**{option.name: value})
        check_option(self.clip_low <= 1, "clip_low", self.clip_low, "at most 1, because a ratio is never below 0")
        self._check_kl()
        self._check_clip()
        self._check_sequences()
        self._check_used("constant", self.average == "constant", "average='constant' divides by it")
        for name in ("gamma", "gae_lambda"):
            self._check_used(name, self.advantage == "gae", "advantage='gae' discounts by it")
            value = getattr(self, name)
            check_option(value is None or value <= 1, name, value, "at most 1, because it is a discount")
        self._check_correction()

    @property
    def weighting(self) -> str:
        """Return the correction: that of the options, or the default for the ratio."""
        return self.correction or ("sequence_mask" if self.has_sequence_ratio else "truncate")

    @property
    def bounds(self) -> tuple[float, float]:
        """Return the least and the largest weight of the correction."""
        low, high = _BOUNDS[self.weighting]
        return (
            low if self.correction_low is None else self.correction_low,
            high if self.correction_high is None else self.correction_high,
        )

    @property
    def discounts(self) -> tuple[float, float]:
        """Return gamma and lambda of advantage = 'gae'."""
        return (1.0 if self.gamma is None else self.gamma, 0.95 if self.gae_lambda is None else self.gae_lambda)

    @property
    def has_sequence_ratio(self) -> bool:
        """Return True if all tokens of a reply have the same ratio."""
        return self.ratio in ("sequence", "sequence_sum")

    @property
    def has_kl(self) -> bool:
        """Return True if a divergence from a reference model enters the loss or the reward."""
        return self.kl != "none"

    def _check_kl(self) -> None:
        if self.kl == "k1":
            raise ConfigError(
                "objective.kl='k1': as a term of the loss, log-prob minus reference log-prob has a gradient of zero in "
                "expectation, and would not keep the policy near the reference; use 'k3' or 'k2', or 'reward', which "
                "subtracts it from the reward"
            )
        if self.has_kl != (self.beta > 0):
            raise ConfigError(
                f"objective.beta={self.beta:g} does not go with objective.kl={self.kl!r}: beta is the weight of the "
                "divergence, so set it above 0 with kl = 'reward', 'k2' or 'k3', and not with 'none'"
            )
        if self.kl == "reward" and self.advantage == "teacher":
            raise ConfigError(
                "objective.kl='reward' does not go with objective.advantage='teacher': a teacher gives advantages and "
                "no reward from which to subtract a divergence; use kl = 'k2' or 'k3'"
            )

    def _check_clip(self) -> None:
        if self.ratio == "none" and self.clip != "none":
            raise ConfigError(
                f"objective.clip={self.clip!r} does not go with objective.ratio='none': there is no ratio to clip; set "
                "clip = 'none', or ratio = 'token'"
            )
        if self.clip == "cispo" and self.cap is None:
            raise ConfigError(
                "objective.clip='cispo' needs objective.cap, the largest weight: without it a rare token's ratio has "
                "no bound; 5 is a usual value"
            )
        self._check_used("cap", self.clip == "cispo", "clip='cispo' has it")
        self._check_used("delta", self.clip == "ratio", "clip='ratio' has it")
        if self.delta is not None and self.delta < 1 + self.clip_high:
            raise ConfigError(
                f"objective.delta={self.delta:g} is below 1 + objective.clip_high={1 + self.clip_high:g}: it would "
                "also bound the ratios of positive advantages, which clip_high does; set it above"
            )

    def _check_sequences(self) -> None:
        if self.has_sequence_ratio and self.weighting in ("truncate", "mask"):
            raise ConfigError(
                f"objective.correction={self.correction!r} does not go with objective.ratio={self.ratio!r}: a reply "
                "with a single ratio cannot weight its tokens differently; use 'sequence_mask' or 'none'"
            )
        if self.ratio == "sequence_sum" and self.average != "sequences":
            raise ConfigError(
                f"objective.average={self.average!r} does not go with objective.ratio='sequence_sum': the ratio of a "
                "complete reply gives it one loss, whose gradient is that of all its tokens, so that longer replies "
                "would count more; set average = 'sequences'"
            )

    def _check_correction(self) -> None:
        is_mask = self.weighting in ("mask", "sequence_mask")
        self._check_used("correction_low", is_mask, "correction='mask' and 'sequence_mask' have it")
        self._check_used("correction_high", self.weighting != "none", "every correction but 'none' has it")
        low, high = self.bounds
        if is_mask and low >= high:
            raise ConfigError(
                f"objective.correction_low={low:g} is not below objective.correction_high={high:g}: every weight would "
                "be 0; lower it"
            )

    def _check_used(self, name: str, used: bool, reason: str) -> None:
        """Raise ConfigError if the option `name` is set and not `used`."""
        value = getattr(self, name)
        if value is not None and not used:
            raise ConfigError(f"objective.{name}={value:g} has no effect: {reason}; remove it")
