"""Policy gradients by name: settings of `PolicyGradient`, which a run file may change one by one.

By default, only RLOO, PPO and distillation need a reference model: the rewards of RLOO and PPO contain the divergence
from it, and it is the teacher of distillation. The others use one if `kl` and `beta` say so. All have the learning rate
and the correction of the sampler's log-probs of `PolicyGradient`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar

from kumi.objectives.policy_gradient import PolicyGradient
from kumi.objectives.policy_options import PolicyOptions
from kumi.spec.field_docs import described


def _default(name: str, value: Any) -> Any:
    """Return the option `name` of policy gradients with another default."""
    [option] = [each for each in fields(PolicyOptions) if each.name == name]
    return described(option.metadata["text"], value, option.metadata["choices"])


@dataclass(frozen=True)
class Grpo(PolicyGradient):
    """GRPO, Shao et al., 2024, arXiv:2402.03300, eq. 3, without its KL term: kl = "k3" and beta = 0.04 add it.

    The clip of 0.2 on both sides is PPO's, and the default of TRL 1.16.
    """

    clip_high: float = _default("clip_high", 0.2)
    average: str = _default("average", "sequences")


@dataclass(frozen=True)
class DrGrpo(PolicyGradient):
    """Dr. GRPO, Liu et al., 2025, arXiv:2503.20783: no bias towards long wrong replies or towards easy prompts."""

    advantage: str = _default("advantage", "group")
    clip_high: float = _default("clip_high", 0.2)
    average: str = _default("average", "constant")


@dataclass(frozen=True)
class Dapo(PolicyGradient):
    """DAPO, Yu et al., 2025, arXiv:2503.14476, eq. 8. Its sampling and its length reward are not part of a
    loss."""

    unit: ClassVar[str] = "tokens"


@dataclass(frozen=True)
class Gspo(PolicyGradient):
    """GSPO, Zheng et al., 2025, arXiv:2507.18071, with the clip of its section 5.1."""

    ratio: str = _default("ratio", "sequence")
    clip_low: float = _default("clip_low", 3e-4)
    clip_high: float = _default("clip_high", 4e-4)
    average: str = _default("average", "sequences")


@dataclass(frozen=True)
class Cispo(PolicyGradient):
    """CISPO, MiniMax, 2025, arXiv:2506.13585, which names no cap; 5 is from Khatri et al., 2025, arXiv:2510.13786."""

    unit: ClassVar[str] = "tokens"
    clip: str = _default("clip", "cispo")
    cap: float | None = _default("cap", 5.0)


@dataclass(frozen=True)
class Rloo(PolicyGradient):
    """RLOO, Ahmadian et al., 2024, arXiv:2402.14740. Its clip and its beta are defaults of TRL 1.16."""

    advantage: str = _default("advantage", "leave_one_out")
    ratio: str = _default("ratio", "sequence_sum")
    clip_high: float = _default("clip_high", 0.2)
    average: str = _default("average", "sequences")
    kl: str = _default("kl", "reward")
    beta: float = _default("beta", 0.05)


@dataclass(frozen=True)
class Ppo(PolicyGradient):
    """PPO, Schulman et al., 2017, arXiv:1707.06347, eq. 7, with a critic: see `kumi.objectives.ppo`. Its clip, its
    discounts and its beta are those of TRL's former PPO trainer."""

    unit: ClassVar[str] = "tokens"
    advantage: str = _default("advantage", "gae")
    clip_high: float = _default("clip_high", 0.2)
    kl: str = _default("kl", "reward")
    beta: float = _default("beta", 0.05)
    gamma: float | None = _default("gamma", 1.0)
    gae_lambda: float | None = _default("gae_lambda", 0.95)


@dataclass(frozen=True)
class MaxRl(PolicyGradient):
    """MaxRL, Tajwar et al., 2026, arXiv:2602.02710: the advantages are divided by the share of successes, so that the
    expected gradient approaches that of the log-likelihood of success. The rest is as in DAPO."""

    unit: ClassVar[str] = "tokens"
    advantage: str = _default("advantage", "mean")


@dataclass(frozen=True)
class OnPolicyDistillation(PolicyGradient):
    """Distillation on replies of the policy: Lu et al., "On-policy distillation", 2025, without a clip.

    A token's advantage is the teacher's log-prob minus the policy's. The expected gradient is that of the divergence
    KL(policy || teacher) of each token, with the distribution of prefixes held fixed.
    """

    unit: ClassVar[str] = "tokens"
    advantage: str = _default("advantage", "teacher")
    clip: str = _default("clip", "none")


# objective.kind -> the preset.
POLICY_GRADIENTS: dict[str, type[PolicyGradient]] = {
    "grpo": Grpo,
    "dr_grpo": DrGrpo,
    "dapo": Dapo,
    "gspo": Gspo,
    "cispo": Cispo,
    "rloo": Rloo,
    "ppo": Ppo,
    "maxrl": MaxRl,
    "distill": OnPolicyDistillation,
}
