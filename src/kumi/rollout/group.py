"""Groups: the replies to one prompt with their rewards, and their form in JSON files, which is exact."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kumi.data.binfile import Array

FINISHES = ("stop", "length")


@dataclass(frozen=True, eq=False)
class GeneratedReply:
    """A reply of the policy.

    ids: its tokens, int32 (n,), n at least 1, with the stop token that ended it.
    log_probs: of each token by the sampler, at the temperature, float64 (n,).
    finish: "stop" if a stop token ended it, "length" if it was cut at its largest number of tokens.
    version: number of updates of the weights that generated it.
    """

    ids: Array
    log_probs: Array
    finish: str
    version: int

    @property
    def truncated(self) -> bool:
        return self.finish == "length"

    def plain(self) -> dict[str, Any]:
        """Return the reply as JSON data."""
        return {
            "ids": _text(self.ids, "<i4"),
            "log_probs": _text(self.log_probs, "<f8"),
            "finish": self.finish,
            "version": self.version,
        }


@dataclass(frozen=True, eq=False)
class Group:
    """The replies to one prompt.

    prompt: the number of the prompt in the run.
    rewards: the reward of each reply; nan for one that cannot be scored.
    parts: the reward of each reply by function; None for a function that could not score it.
    """

    prompt: int
    replies: tuple[GeneratedReply, ...]
    rewards: tuple[float, ...]
    parts: tuple[Mapping[str, float | None], ...]

    @property
    def differs(self) -> bool:
        """Return True if two replies have different rewards, so that the group can teach something."""
        scored = [reward for reward in self.rewards if not math.isnan(reward)]
        return bool(scored) and min(scored) < max(scored)

    def plain(self) -> dict[str, Any]:
        """Return the group as JSON data."""
        return {
            "prompt": self.prompt,
            "replies": [reply.plain() for reply in self.replies],
            "rewards": [None if math.isnan(reward) else reward for reward in self.rewards],
            "parts": [dict(part) for part in self.parts],
        }


def read_group(plain: Mapping[str, Any]) -> Group:
    """Return the group that `Group.plain` wrote. Raise ValueError, KeyError or TypeError for other data."""
    rewards, parts = read_rewards(plain)
    replies = tuple(read_reply(reply) for reply in plain["replies"])
    if not len(replies) == len(rewards) == len(parts):
        raise ValueError("the group has other numbers of replies and of rewards")
    return Group(int(plain["prompt"]), replies, rewards, parts)


def read_rewards(plain: Mapping[str, Any]) -> tuple[tuple[float, ...], tuple[Mapping[str, float | None], ...]]:
    """Return the rewards and parts of a group that `Group.plain` wrote; raise as `read_group` does."""
    rewards = tuple(math.nan if reward is None else float(reward) for reward in plain["rewards"])
    return rewards, tuple(dict(part) for part in plain["parts"])


def read_reply(plain: Mapping[str, Any]) -> GeneratedReply:
    """Return the reply that `GeneratedReply.plain` wrote; raise as `read_group` does."""
    ids, log_probs = numbers(plain["ids"], "<i4"), numbers(plain["log_probs"], "<f8")
    if len(ids) != len(log_probs) or not len(ids) or plain["finish"] not in FINISHES:
        raise ValueError("the reply is damaged")
    return GeneratedReply(ids, log_probs, plain["finish"], int(plain["version"]))


def _text(values: Array | Sequence[float], dtype: str) -> str:
    return base64.b64encode(np.ascontiguousarray(values, np.dtype(dtype)).tobytes()).decode()


def numbers(text: str, dtype: str = "<f8") -> Array:
    """Return the array whose bytes `text` has in base64."""
    return np.frombuffer(base64.b64decode(text, validate=True), np.dtype(dtype))


def as_text(values: Array) -> str:
    """Return the bytes of float64 `values` in base64."""
    return _text(values, "<f8")
