"""The length reward of DAPO ("soft overlong punishment", arXiv:2503.14476, equation 13)."""

from __future__ import annotations

from kumi.rewards.reward_spec import LengthReward

# By default, the reward falls over the last fifth of the tokens: in DAPO, the last 4,096 of 20,480.
_SOFT_SHARE = 5


def length_bounds(spec: LengthReward, max_new_tokens: int) -> tuple[int, int]:
    """Return the number of tokens up to which the reward is 0, and the number from which on it is -1.

    `max_new_tokens`: the tokens that a reply may have. Raise ConfigError if no reply can reach the second number, or if
    the first one would be below 0.
    """
    longest = max_new_tokens if spec.max_tokens is None else spec.max_tokens
    soft = max(1, longest // _SOFT_SHARE) if spec.soft_tokens is None else spec.soft_tokens
    if longest > max_new_tokens:
        raise spec.error("max_tokens", longest, f"is more than the {max_new_tokens} that a reply may have; lower it")
    if soft > longest:
        raise spec.error("soft_tokens", soft, f"is more than max_tokens={longest}; lower it")
    return longest - soft, longest


def length_reward(tokens: int, bounds: tuple[int, int]) -> float:
    """Return the reward of a reply of `tokens`: 0 up to the first bound, falling linearly to -1 at the second."""
    start, longest = bounds
    return min(0.0, max(-1.0, (start - tokens) / (longest - start)))
