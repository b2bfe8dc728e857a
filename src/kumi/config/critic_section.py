"""The section [critic] of a run file: the second model of PPO, which predicts the returns of replies."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from kumi.config.section import Number, Section, Text

# The learning rate of a critic for which the run file sets none, as a multiple of the policy's: the critic's head is
# new, and its loss is that of a regression. OpenRLHF and verl have 18 and 10.
_RATE = 10


class CriticSection(Section):
    """The critic of objective.advantage = 'gae', which 'ppo' has: a model of the policy's shape with a value head.

    It is trained beside the policy on the same layout, with the settings of [optim] but for those given here.
    """

    model: Text | None = Field(
        None,
        description="A Hugging Face folder or hub id from which the critic begins, of the policy's shape: a reward "
        "model, or a language model that gets a new value head; by default the policy before its first step.",
    )
    lr: Annotated[Number, Field(gt=0)] | None = Field(
        None, description=f"Peak learning rate of the critic; by default {_RATE} times optim.lr."
    )
    grad_clip: Annotated[Number, Field(ge=0)] | None = Field(
        None, description="Largest gradient norm of the critic; 0 does not clip; by default optim.grad_clip."
    )
    value_clip: Annotated[Number, Field(ge=0)] = Field(
        0.2,
        description="How far the updates with a batch may move a value from what it was before them; 0 does not clip.",
    )

    @property
    def is_set(self) -> bool:
        """Return True if a key differs from its default. The stored configuration of a run gives all keys, so whether a
        key is given says nothing."""
        return self != CriticSection()

    def rate(self, of_policy: float) -> float:
        """Return the peak learning rate of the critic, given that of the policy."""
        return _RATE * of_policy if self.lr is None else self.lr
