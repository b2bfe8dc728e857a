"""The interface of an engine: it generates replies with the policy's weights. Token ids go in and come out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from kumi.inference.sampling import Sampling
from kumi.rollout.group import GeneratedReply


@dataclass(frozen=True)
class SampleRequest:
    """A request for one reply.

    prompt: the number of the prompt in the run, and sample: that of the reply within the group.
    ids: the tokens of the prompt.
    noise: the number of the reply among all replies of the run to prompts with these tokens. With the seed, the tokens
        and the position, it decides the noise, so that no order and no layout changes a reply.
    """

    prompt: int
    sample: int
    ids: Sequence[int]
    noise: int


class Engine(Protocol):
    """Generates replies with the weights of the last `update`.

    All ranks of the run make the same calls in the same order.
    """

    def generate(
        self, requests: Sequence[SampleRequest], sampling: Sampling
    ) -> Iterator[tuple[SampleRequest, GeneratedReply]]:
        """Yield the replies that this rank generates, as each one ends. Together, the ranks answer each request once.

        The caller exhausts the iterator.
        """

    def update(self, version: int) -> None:
        """Take the policy's weights as they are after `version` updates."""

    def close(self) -> None:
        """End what the engine has started."""
