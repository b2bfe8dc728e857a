"""Rewards of replies for reinforcement learning, without torch.

reward_spec     the configured rewards
scorer          scores the replies of a step, in processes (timed_workers, reward_worker), in threads or directly
text_rewards    answers, numbers (number_text), regular expressions, JSON schemas (json_schema)
function_reward, gym_reward, length_reward, judge (http_request), code_reward (sandbox)
                each the reward of its name
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kumi.rewards.reward_spec import REWARD_KINDS, RewardSpec, spec_from

if TYPE_CHECKING:
    from kumi.rewards.scorer import RewardFaults, RewardRequest, RewardResult, RewardScorer, ScoreModel, Unscored

__all__ = [
    "REWARD_KINDS",
    "RewardFaults",
    "RewardRequest",
    "RewardResult",
    "RewardScorer",
    "RewardSpec",
    "ScoreModel",
    "Unscored",
    "spec_from",
]


def __getattr__(name: str) -> Any:
    # Imported when it is first used: every command reads run files, and few score replies.
    if name not in __all__:
        raise AttributeError(f"module 'kumi.rewards' has no attribute {name!r}")
    return getattr(import_module("kumi.rewards.scorer"), name)
