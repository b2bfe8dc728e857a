"""The interface of an environment: it decides what the policy's replies have achieved.

    Engine: prompts -> replies        Environment: (prompt, reply) -> Outcome        Group: replies with outcomes

Each reply ends its conversation. An environment of several turns, such as one with tools, would answer a reply with
tokens to go on from instead of an outcome. `GroupCollector` would then ask the engine again, and `GeneratedReply` would
mark the tokens that the policy has not generated, because no update may train on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kumi.rollout.group import GeneratedReply, Outcome
from kumi.rollout.prompt_sampler import Prompt


class Environment(Protocol):
    """Judges finished replies. All ranks of the run make the same calls in the same order."""

    def outcomes(
        self, prompts: Sequence[Prompt], replies: Sequence[Sequence[GeneratedReply]]
    ) -> list[tuple[Outcome, ...]]:
        """Return, for each of `prompts`, the outcomes of its `replies`, the same on all ranks."""

    def notes(self) -> Sequence[str]:
        """Return sentences for the user on what went wrong on this rank since the last call."""
