"""A table [[rewards]] of a run file: the kind of a reward, and the keys of all kinds.

The keys are the fields of the rewards' dataclasses (`kumi.rewards.REWARD_KINDS`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import Field
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from pydantic import Field as Key

from kumi.config.kind_section import KindSection, with_keys_of_kinds
from kumi.config.section import Number
from kumi.rewards.reward_spec import REWARD_KINDS, ModelReward, RewardSpec, check_rewards

if TYPE_CHECKING:
    RewardKind: TypeAlias = str
else:
    RewardKind = Literal[tuple(REWARD_KINDS)]

_Count = Annotated[int, Key(strict=True)]


class RewardKindSection(KindSection):
    """A reward of replies, for reinforcement learning. A key is used by the kinds that are named beside it."""

    kinds = REWARD_KINDS
    kind: RewardKind = Key(
        description="'function' is your own; 'exact', 'number', 'boxed', 'regex' and 'json-schema' compare texts; "
        "'reasoning-gym' is the scorer of a problem's task; 'length' counts tokens; 'model' is a reward model, 'judge' "
        "a chat model by HTTP; 'code' runs tests in a sandbox.",
        examples=["boxed"],
    )

    def build(self) -> RewardSpec:
        """Return the reward. Raise ConfigError for keys that contradict each other."""
        reward: RewardSpec = super().build()
        return reward


def _annotation(key: Field[Any]) -> Any:
    """Return the type of the value of a key: one of its choices, a text, a count or a number."""
    choices = key.metadata["choices"]
    if choices:
        return Literal[choices]
    kinds = {str: str, int: _Count, float: Number}
    # Keys whose default is None are counts.
    return kinds.get(type(key.default), _Count)


if TYPE_CHECKING:
    RewardSection: TypeAlias = RewardKindSection
else:
    RewardSection = with_keys_of_kinds("RewardSection", RewardKindSection, _annotation)


def reward_specs(sections: Sequence[RewardKindSection]) -> list[RewardSpec]:
    """Return the rewards of a run. Raise ConfigError if two have the same name, or all have weight 0."""
    rewards = [section.build() for section in sections]
    check_rewards(rewards)
    return rewards


def model_rewards(sections: Sequence[RewardKindSection]) -> dict[str, ModelReward]:
    """Return the rewards that are reward models, by the words for their key `source` in messages and records."""
    rewards = [section.build() for section in sections]
    return {f"rewards.{reward.name}.source": reward for reward in rewards if isinstance(reward, ModelReward)}
