"""Groups: the replies to one prompt with their outcomes. Their form in JSON files loses no digit of a number."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kumi.data.binfile import Array

# The values of `GeneratedReply.finish`.
FINISHES = ("stop", "length")
# The dtype of an array in a file -> the dtype of the array that is read from it; see `as_text`.
_DTYPES = {"<i4": np.int32, "<f4": np.float64, "<f8": np.float64}


@dataclass(frozen=True, eq=False)
class GeneratedReply:
    """A reply of the policy.

    ids: its tokens, int32 (n,), n at least 1, with the stop token that ended it.
    log_probs: the sampler's log-prob of each token, at the temperature of sampling, float64 (n,).
    finish: "stop" if a stop token ended it, "length" if it was cut at its largest number of tokens.
    version: the weights after this number of updates generated the reply.
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


@dataclass(frozen=True)
class Outcome:
    """What a reply has achieved.

    reward: nan if the reply cannot be scored.
    parts: the value of each configured reward, by its name; None for a reward that did not score the reply.
    """

    reward: float
    parts: Mapping[str, float | None]


@dataclass(frozen=True, eq=False)
class Group:
    """The replies to one prompt. prompt: the number of the prompt in the run. outcomes: one for each reply."""

    prompt: int
    replies: tuple[GeneratedReply, ...]
    outcomes: tuple[Outcome, ...]

    @property
    def rewards(self) -> list[float]:
        """The reward of each reply; nan for one that cannot be scored."""
        return [outcome.reward for outcome in self.outcomes]

    @property
    def differs(self) -> bool:
        """Return True if two replies have different rewards, so that not all advantages are 0."""
        scored = [reward for reward in self.rewards if not math.isnan(reward)]
        return bool(scored) and min(scored) < max(scored)

    def plain(self) -> dict[str, Any]:
        """Return the group as JSON data."""
        return {
            "prompt": self.prompt,
            "replies": [reply.plain() for reply in self.replies],
            **plain_outcomes(self.outcomes),
        }


def read_group(plain: Mapping[str, Any]) -> Group:
    """Return the group that `Group.plain` wrote. Raise ValueError, KeyError or TypeError for other data."""
    replies, outcomes = tuple(read_reply(reply) for reply in plain["replies"]), read_outcomes(plain)
    if len(replies) != len(outcomes):
        raise ValueError(f"the group has {len(replies)} replies, but {len(outcomes)} rewards")
    return Group(int(plain["prompt"]), replies, outcomes)


def plain_outcomes(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return the outcomes of a group as JSON data."""
    return {
        "rewards": [None if math.isnan(outcome.reward) else outcome.reward for outcome in outcomes],
        "parts": [dict(outcome.parts) for outcome in outcomes],
    }


def read_outcomes(plain: Mapping[str, Any]) -> tuple[Outcome, ...]:
    """Return the outcomes that `plain_outcomes` wrote; raise as `read_group` does."""
    rewards = [math.nan if reward is None else float(reward) for reward in plain["rewards"]]
    return tuple(Outcome(reward, dict(parts)) for reward, parts in zip(rewards, plain["parts"], strict=True))


def read_reply(plain: Mapping[str, Any]) -> GeneratedReply:
    """Return the reply that `GeneratedReply.plain` wrote; raise as `read_group` does."""
    ids, log_probs = as_array(plain["ids"]), as_array(plain["log_probs"])
    is_whole = len(ids) == len(log_probs) > 0 and ids.dtype == np.int32 and log_probs.dtype == np.float64
    if not is_whole or plain["finish"] not in FINISHES:
        raise ValueError("the reply is damaged")
    return GeneratedReply(ids, log_probs, plain["finish"], int(plain["version"]))


def as_array(text: str) -> Array:
    """Return the array that `as_text` wrote. Raise ValueError for another text."""
    dtype, _, content = text.partition(":")
    if dtype not in _DTYPES:
        raise ValueError(f"an array has the unknown dtype {dtype[:8]!r}")
    return np.frombuffer(base64.b64decode(content, validate=True), np.dtype(dtype)).astype(_DTYPES[dtype])


def as_text(values: Array) -> str:
    """Return `values`, int32 or float64, as a text: a dtype and the bytes in base64.

    The dtype is that of `values`, or float32 for float64 values that float32 holds exactly.
    """
    fits_float32 = values.dtype != np.int32 and np.array_equal(values.astype(np.float32), values)
    dtype = "<i4" if values.dtype == np.int32 else "<f4" if fits_float32 else "<f8"
    return f"{dtype}:{base64.b64encode(np.ascontiguousarray(values, np.dtype(dtype)).tobytes()).decode()}"
