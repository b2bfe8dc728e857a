"""The section [objective] of a run file: the kind of the objective, and the options of all kinds.

The options are the fields of the objectives' dataclasses (`kumi.objectives.OBJECTIVES`), so that a new objective needs
no change here. A key that a kind does not use is refused.
"""

from __future__ import annotations

from dataclasses import MISSING, Field, fields
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from pydantic import Field as Key
from pydantic import create_model, model_validator

from kumi.config.section import Number, Section, Text
from kumi.errors import ConfigError
from kumi.objectives import OBJECTIVES, Objective, RowForm

if TYPE_CHECKING:
    ObjectiveKind: TypeAlias = str
else:
    ObjectiveKind = Literal[tuple(OBJECTIVES)]


def options_of(kind: str) -> dict[str, Field[Any]]:
    """Return the options of the objective `kind` by name."""
    objective: Any = OBJECTIVES[kind]
    return {option.name: option for option in fields(objective)}


def _annotation(option: Field[Any]) -> Any:
    """Return the type of the key for an option: one of its choices, or a number."""
    choices = option.metadata["choices"]
    return (Literal[choices] if choices else Number) | None


def _description(name: str) -> str:
    """Return the description of the key `name`, with the kinds that use it and their defaults."""
    of_kind = {kind: options_of(kind)[name] for kind in OBJECTIVES if name in options_of(kind)}
    texts: dict[str, dict[str, list[str]]] = {}
    for kind, option in of_kind.items():
        assert option.default is not MISSING, "an option of an objective has a default"
        default = "" if option.default is None else f": {_value(option.default)}"
        texts.setdefault(option.metadata["text"], {}).setdefault(default, []).append(f"`{kind}`")
    return " ".join(f"{text.rstrip('.')} ({_kinds(kinds)})." for text, kinds in texts.items())


def _kinds(kinds_of: dict[str, list[str]]) -> str:
    """Return the kinds of each default in `kinds_of` with that default, as words."""
    return "; ".join(f"{', '.join(kinds)}{default}" for default, kinds in kinds_of.items())


def _value(value: Any) -> str:
    return f"'{value}'" if isinstance(value, str) else f"{value:g}"


class KindSection(Section):
    """The training objective. A key is used by the kinds that are named beside it, each with its default."""

    kind: ObjectiveKind = Key(
        "lm",
        description="'lm' is next-token prediction, 'sft' the same on the replies of examples only; 'dpo', 'orpo', "
        "'simpo' and 'cpo' train on pairs of replies, 'kto' on replies that are desirable or not; 'reward' trains a "
        "reward model on pairs; 'grpo', 'dr_grpo', 'dapo', 'gspo', 'cispo', 'rloo' and 'maxrl' are policy gradients on "
        "rewards of the policy's own replies, 'distill' on a teacher's log-probs of them: see [rollout].",
    )

    @model_validator(mode="after")
    def _check_options(self) -> KindSection:
        used = options_of(self.kind)
        for name in self.given:
            if name not in used:
                kinds = ", ".join(repr(kind) for kind in OBJECTIVES if name in options_of(kind))
                keys = f"its keys are {', '.join(used)}" if used else "it has no other key"
                raise ValueError(f"{name} is not a key of kind={self.kind!r}, but of {kinds}; {keys}")
        try:
            self.build()
        except ConfigError as error:
            raise ValueError(str(error).removeprefix("objective.")) from None
        return self

    @property
    def words(self) -> str:
        """What the objective does, as a phrase: "predicting tokens", or its kind with the options that are set."""
        options = ", ".join(f"{name} {value}" for name, value in self.given.items())
        return "predicting tokens" if self.kind == "lm" else f"{self.kind}{options and f' ({options})'}"

    @property
    def given(self) -> dict[str, Any]:
        """The options that are set."""
        return {name: value for name, value in self.model_dump(exclude={"kind"}).items() if value is not None}

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
        """Return True if the objective needs the policy's log-probs before the updates with every rollout batch."""
        return self.build().needs_old_log_probs

    def build(self) -> Objective:
        """Return the objective. Raise ConfigError for options that contradict each other."""
        return OBJECTIVES[self.kind](**self.given)


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
    def given(self) -> bool:
        """Return True if a key is set."""
        return self.kind != "stored" or self.model is not None


_OPTIONS = {name: option for kind in OBJECTIVES for name, option in options_of(kind).items()}

if TYPE_CHECKING:
    ObjectiveSection: TypeAlias = KindSection
else:
    ObjectiveSection = create_model(
        "ObjectiveSection",
        __base__=KindSection,
        __doc__=KindSection.__doc__,
        **{
            name: (Annotated[_annotation(option), Key(description=_description(name))], None)
            for name, option in _OPTIONS.items()
        },
    )
