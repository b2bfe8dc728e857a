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

    prompt: the number of the prompt in the run. sample: the number of the reply within its group.
    ids: the tokens of the prompt.
    noise: the number of the reply among all replies of the run. With the seed, the tokens of the prompt and the
        position of a token, it decides the noise of sampling, so that neither the order of requests nor the layout
        changes a reply.
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
        """Yield the replies that this rank generates, as each one ends.

        Together, the data-parallel ranks answer each request once; the ranks of a tp group yield the same replies. The
        caller must exhaust the iterator.
        """

    def update(self, version: int) -> None:
        """Take the policy's weights as they are after `version` updates."""

    def close(self) -> None:
        """End what the engine has started."""
