"""The section [rollout] of a run file: how the policy's own replies become the batches of reinforcement learning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field, model_validator

from kumi.config.objective_section import ObjectiveKindSection, ReferenceSection
from kumi.config.reward_section import RewardKindSection, reward_specs
from kumi.config.section import NotNegative, Number, Positive, Section, Switch
from kumi.errors import ConfigError
from kumi.objectives.policy_options import TOKEN_ADVANTAGES


class RolloutSection(Section):
    """Replies that the model generates for reinforcement learning, with the weights that are trained."""

    prompts: Positive = Field(32, description="Prompts of a rollout batch: the groups that `updates` share.")
    group_size: Positive = Field(
        8,
        description="Replies to each prompt, which form a group; 1 is enough for advantages of a teacher or a critic.",
    )
    max_new_tokens: Positive = Field(256, description="Tokens of the longest reply; longer ones are cut.")
    temperature: Annotated[Number, Field(gt=0)] = Field(
        1.0, description="Sampling temperature. The log-probs that are trained are those at this temperature, too."
    )
    top_p: Number = Field(1.0, description="Only 1: all tokens can be drawn.")
    top_k: NotNegative = Field(0, description="Only 0: all tokens can be drawn.")
    updates: Positive = Field(
        1, description="Updates for each batch, each on an equal part of its groups; a step of the run is one update."
    )
    passes: Positive = Field(1, description="Times that a batch is gone through, each with `updates` updates.")
    dynamic: Switch = Field(
        False,
        description="Dynamic sampling: groups whose replies all have the same reward are dropped, and further prompts "
        "are drawn until the batch is full; further groups that differ are kept for the next batch.",
    )
    max_rounds: Positive = Field(
        10, description="The most rounds of prompts for a batch with `dynamic`; then dropped groups fill the batch up."
    )
    mask_truncated: Switch = Field(
        False,
        description="Do not train replies that were cut; their rewards still count for the others of their group.",
    )
    stop_after: NotNegative = Field(
        20,
        description="End the run with an error after this many updates in a row in which all advantages are 0; 0 never "
        "ends it.",
    )
    slots: Positive = Field(64, description="Sequences that a data-parallel rank decodes at once.")
    prompt_tokens: Positive | None = Field(
        None,
        description="Tokens of a prompt, for the plan while the data is not prepared; by default, all that a row of "
        "`batch.seq_len` leaves beside the longest reply.",
    )
    reply_tokens: Positive | None = Field(
        None,
        description="Mean tokens of a reply, for the plan before the run has measured it; by default `max_new_tokens`.",
    )
    samples_every: NotNegative = Field(
        10, description="Batches between pages of replies with their rewards, `samples/rollout-N.md`; 0 writes none."
    )

    @model_validator(mode="after")
    def _check(self) -> RolloutSection:
        """Refuse filters of tokens, and updates that do not divide the prompts."""
        if self.top_p != 1:
            raise ValueError(f"top_p={_renormalised(self.top_p)}")
        if self.top_k != 0:
            raise ValueError(f"top_k={_renormalised(self.top_k)}")
        if self.prompts % self.updates:
            raise ValueError(
                f"updates={self.updates} does not divide prompts={self.prompts}, and updates have equal numbers of "
                f"groups; change one of them"
            )
        return self

    @property
    def steps(self) -> int:
        """The number of updates with one batch."""
        return self.updates * self.passes


def _renormalised(value: float) -> str:
    """Return the `value` of top_p or top_k with the reason why it is refused."""
    return (
        f"{value:g} is refused: without the less likely tokens, the sampler's log-probs are those of another "
        f"distribution than the policy's, and the ratio between them is biased; use top_p = 1 and top_k = 0"
    )


def check_rewards(rewards: Sequence[RewardKindSection], objective: ObjectiveKindSection) -> None:
    """Raise ValueError if `rewards` contradict each other, or if `objective` reads no rewards."""
    if not rewards:
        return
    try:
        reward_specs(rewards)
    except ConfigError as error:
        raise ValueError(f"rewards: {error}") from None
    if not objective.rows.generates:
        raise ValueError(
            f"rewards: objective.kind={objective.kind!r} trains on the rows of the data, not on replies with "
            "rewards; remove [[rewards]]"
        )


def check_objective(
    rollout: RolloutSection | None, objective: ObjectiveKindSection, has_rewards: bool, reference: ReferenceSection
) -> None:
    """Raise ValueError unless a run has [rollout] if and only if its objective trains on replies of the model, and has
    what its advantages follow from: rewards or a teacher, and groups of several replies for those that compare them."""
    if not objective.rows.generates:
        if rollout is not None:
            raise ValueError(
                f"rollout: objective.kind={objective.kind!r} trains on the data, and needs no replies of the "
                f"model; remove [rollout], or set objective.kind to one of reinforcement learning, such as 'grpo'"
            )
        return
    if rollout is None:
        raise ValueError(f"objective.kind={objective.kind!r} trains on replies that the model generates; add [rollout]")
    advantage = getattr(objective.build(), "advantage", None)
    of_groups = advantage not in TOKEN_ADVANTAGES
    if rollout.dynamic and not of_groups:
        raise ValueError(
            f"rollout.dynamic=true drops groups of equal rewards, but objective.advantage={advantage!r} learns from "
            f"these, too; set rollout.dynamic=false"
        )
    if rollout.group_size == 1 and of_groups:
        raise ValueError(
            f"rollout.group_size=1: objective.advantage={advantage!r} compares the replies to a prompt with each "
            f"other; set it to 2 or more"
        )
    if advantage == "teacher" and reference.model is None:
        raise ValueError("objective.advantage='teacher' learns from another model; set reference.model to the teacher")
    if advantage != "teacher" and not has_rewards:
        raise ValueError(
            f"objective.kind={objective.kind!r} learns from the rewards of replies, and none is configured; "
            f"add a table [[rewards]]"
        )
