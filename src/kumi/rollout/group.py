"""Groups: the replies to one prompt with their rewards, and their form in JSON files, which is exact."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kumi.data.binfile import Array

FINISHES = ("stop", "length")
# Types in a file, and those of the arrays that are read from it.
_DTYPES = {"<i4": np.int32, "<f4": np.float64, "<f8": np.float64}


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
            "ids": as_text(self.ids),
            "log_probs": as_text(self.log_probs),
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
    ids, log_probs = numbers(plain["ids"]), numbers(plain["log_probs"])
    is_whole = len(ids) == len(log_probs) > 0 and ids.dtype == np.int32 and log_probs.dtype == np.float64
    if not is_whole or plain["finish"] not in FINISHES:
        raise ValueError("the reply is damaged")
    return GeneratedReply(ids, log_probs, plain["finish"], int(plain["version"]))


def numbers(text: str) -> Array:
    """Return the array that `as_text` wrote. Raise ValueError for another text."""
    dtype, _, content = text.partition(":")
    if dtype not in _DTYPES:
        raise ValueError(f"the numbers have the type {dtype[:8]!r}")
    return np.frombuffer(base64.b64decode(content, validate=True), np.dtype(dtype)).astype(_DTYPES[dtype])


def as_text(values: Array) -> str:
    """Return `values`, int32 or float64, as a text: their bytes in base64, those of float32 where that is exact."""
    is_single = values.dtype != np.int32 and np.array_equal(values.astype(np.float32), values)
    dtype = "<i4" if values.dtype == np.int32 else "<f4" if is_single else "<f8"
    return f"{dtype}:{base64.b64encode(np.ascontiguousarray(values, np.dtype(dtype)).tobytes()).decode()}"
