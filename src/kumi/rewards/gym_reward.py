"""The reward of problems of reasoning-gym: the score by their task's own scorer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kumi.data.gym_task import load_package, row_scorer
from kumi.rewards.reward_spec import GymReward
from kumi.rewards.text_rewards import RewardFunction, text_after


def gym_reward(spec: GymReward) -> RewardFunction:
    """Return the reward of replies to problems. Raise ConfigError if the package is not installed."""
    load_package()  # before the first reply, whose time is limited

    def reward(prompt: str, reply: str, row: Mapping[str, Any]) -> float:
        score = row_scorer(row, spec.tag)
        text = text_after(reply, spec.after)
        return 0.0 if text is None else score(text)

    return reward
