"""The rollouts of reinforcement learning: the replies that a run generates between its updates, and their lengths."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kumi.spec.layout import Layout
from kumi.spec.model import ModelSpec

# How often one call of the generating engine fills the slots of a data-parallel rank: the replies of the call on a
# rank, divided by the sequences that it decodes at once. All ranks wait for the longest reply only at the end of a
# call.
FILLS = 8

# Where a number of tokens comes from: its upper bound, as nothing else is known ("assumed"), a key of the run file, the
# prepared data, or finished steps of the run ("measured").
LengthSource = Literal["assumed", "run file", "data", "measured"]


@dataclass(frozen=True)
class RolloutSpec:
    """A rollout batch: groups of replies, and the updates that train on them.

    - `prompts`, `group_size`: groups of a batch, and replies of each.
    - `max_new_tokens`: tokens of the longest reply. `slots`: sequences that a data-parallel rank decodes at once.
    - `updates`: parts of the batch, one update each. `passes`: how often training goes through the batch.
    - `prompt_tokens`, `reply_tokens`: mean tokens. `longest_prompt`: tokens of the longest prompt.
    - `prompts_from`, `replies_from`: where the numbers of tokens of prompts, and of replies, come from.
    - `reference`: True if the reference is a second model in memory.
    - `reward_models`: name and model of each reward model, on the layout of the policy.
    """

    prompts: int
    group_size: int
    max_new_tokens: int
    slots: int
    updates: int
    passes: int
    prompt_tokens: float
    longest_prompt: int
    reply_tokens: float
    prompts_from: LengthSource = "assumed"
    replies_from: LengthSource = "assumed"
    reference: bool = False
    reward_models: tuple[tuple[str, ModelSpec], ...] = ()

    @property
    def replies(self) -> int:
        """Replies of a batch, over all ranks."""
        return self.prompts * self.group_size

    @property
    def steps(self) -> int:
        """Updates of the weights with one batch."""
        return self.updates * self.passes

    @property
    def context(self) -> int:
        """Positions of a slot of the cache: the longest prompt and the longest reply."""
        return self.longest_prompt + self.max_new_tokens

    def rank_slots(self, layout: Layout) -> int:
        """Return the slots of the cache of a rank: at most as many as the rank has replies of a batch.

        Sequence parallelism rounds them up to a multiple of tp.
        """
        slots = min(self.slots, -(-self.replies // layout.dp))
        return slots + (-slots % layout.tp if layout.sequence_parallel else 0)
