"""The section [objective] of a run file: the kind of the objective, and the options of all kinds.

The options are the fields of the objectives' dataclasses (`kumi.objectives.OBJECTIVES`).
"""

from __future__ import annotations

from dataclasses import Field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from pydantic import Field as Key

from kumi.config.kind_section import KindSection, with_keys_of_kinds
from kumi.config.section import Number, Section, Text
from kumi.objectives import OBJECTIVES, Objective, RowForm

if TYPE_CHECKING:
    ObjectiveKind: TypeAlias = str
else:
    ObjectiveKind = Literal[tuple(OBJECTIVES)]


class ObjectiveKindSection(KindSection):
    """The training objective. A key is used by the kinds that are named beside it, each with its default."""

    kinds = OBJECTIVES
    kind: ObjectiveKind = Key(
        "lm",
        description="'lm' is next-token prediction, 'sft' the same on the replies of examples only; 'dpo', 'orpo', "
        "'simpo' and 'cpo' train on pairs of replies, 'kto' on replies that are desirable or not; 'reward' trains a "
        "reward model on pairs; 'grpo', 'dr_grpo', 'dapo', 'gspo', 'cispo', 'rloo', 'ppo' and 'maxrl' are policy "
        "gradients on rewards of the policy's own replies, 'distill' on a teacher's log-probs of them: see [rollout].",
    )

    @property
    def words(self) -> str:
        """What the objective does, as a phrase: "predicting tokens", or its kind with the options that are set."""
        options = ", ".join(f"{name} {value}" for name, value in self.given.items())
        return "predicting tokens" if self.kind == "lm" else f"{self.kind}{options and f' ({options})'}"

    @property
    def rows(self) -> RowForm:
        """The rows of data that the objective trains."""
        return OBJECTIVES[self.kind].rows

    @property
    def compares(self) -> bool:
        """Return True if the objective compares the policy with a reference model."""
        return OBJECTIVES[self.kind].reference

    @property
    def reads_reference(self) -> bool:
        """Return True if the objective needs log-probs of a reference model, stored or of every rollout batch."""
        return self.build().reads_reference

    @property
    def needs_old_log_probs(self) -> bool:
        """Return True if the objective needs log-probs by the policy that began a rollout batch even for one update."""
        return self.build().needs_old_log_probs

    @property
    def trains_critic(self) -> bool:
        """Return True if a critic is trained beside the policy."""
        return self.build().trains_critic

    def build(self) -> Objective:
        """Return the objective. Raise ConfigError for options that contradict each other."""
        objective: Objective = super().build()
        return objective


class ReferenceSection(Section):
    """The reference model, with which 'dpo', 'kto' and policy gradients with `kl` compare the policy; the teacher of
    'distill'."""

    kind: Literal["stored", "adapters-off"] = Key(
        "stored",
        description="'stored' computes the reference's log-probs once, before the first step, and stores them beside "
        "the data; 'adapters-off' computes them at every step, by the model without its adapters. A run with [rollout] "
        "computes those of each batch, by default by the model without its adapters if it has any, else by a second "
        "model.",
    )
    model: Text | None = Key(
        None,
        description="A Hugging Face folder or hub id of the reference, of the same shape as the model; by default the "
        "policy before its first step.",
    )

    @property
    def is_set(self) -> bool:
        """Return True if a key differs from its default."""
        return self.kind != "stored" or self.model is not None


def _annotation(option: Field[Any]) -> Any:
    """Return the type of the key for an option: one of its choices, or a number."""
    choices = option.metadata["choices"]
    return Literal[choices] if choices else Number


if TYPE_CHECKING:
    ObjectiveSection: TypeAlias = ObjectiveKindSection
else:
    ObjectiveSection = with_keys_of_kinds("ObjectiveSection", ObjectiveKindSection, _annotation)
