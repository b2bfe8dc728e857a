"""A table [[rewards]] of a run file: the kind of a reward, and the keys of all kinds.

The keys are the fields of the rewards' dataclasses (`kumi.rewards.REWARD_KINDS`), so that a new kind needs no change
here. A key that a kind does not use is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import Field, fields
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from pydantic import Field as Key
from pydantic import create_model, model_validator

from kumi.config.section import Number, Section
from kumi.errors import ConfigError
from kumi.rewards.reward_spec import REWARD_KINDS, RewardSpec, check_rewards, spec_from

if TYPE_CHECKING:
    RewardKind: TypeAlias = str
else:
    RewardKind = Literal[tuple(REWARD_KINDS)]

_Count = Annotated[int, Key(strict=True)]


def _keys_of(kind: str) -> dict[str, Field[Any]]:
    """Return the keys of the reward `kind` by name."""
    return {key.name: key for key in fields(REWARD_KINDS[kind])}


def _annotation(key: Field[Any]) -> Any:
    """Return the type of the value of a key: one of its choices, a text, a count or a number."""
    choices = key.metadata["choices"]
    if choices:
        return Literal[choices] | None
    kinds = {str: str, int: _Count, float: Number}
    # A count without a default is None.
    return kinds.get(type(key.default), _Count) | None


def _description(name: str) -> str:
    """Return the description of the key `name`, with the kinds that use it and their defaults."""
    of_kind = {kind: _keys_of(kind)[name] for kind in REWARD_KINDS if name in _keys_of(kind)}
    texts: dict[str, dict[Any, list[str]]] = {}
    for kind, key in of_kind.items():
        texts.setdefault(key.metadata["text"], {}).setdefault(key.default, []).append(f"`{kind}`")
    everywhere = len(of_kind) == len(REWARD_KINDS) and len(texts) == 1
    return " ".join(_with_uses(text, defaults, everywhere) for text, defaults in texts.items())


def _with_uses(text: str, defaults: Mapping[Any, Sequence[str]], everywhere: bool) -> str:
    """Return `text` with the kinds that have each default, unless all kinds have it."""
    uses = []
    for default, kinds in defaults.items():
        value = "" if default in (None, "") else f"{default:g}" if isinstance(default, int | float) else f"'{default}'"
        uses.append(": ".join(filter(None, ["" if everywhere else ", ".join(kinds), value])))
    listed = "; ".join(filter(None, uses))
    return f"{text.rstrip('.')} ({listed})." if listed else text


class RewardKindSection(Section):
    """A reward of replies, for reinforcement learning. A key is used by the kinds that are named beside it."""

    kind: RewardKind = Key(
        description="'function' is your own; 'exact', 'number', 'boxed', 'regex' and 'json-schema' compare texts; "
        "'length' counts tokens; 'model' is a reward model, 'judge' a chat model by HTTP; 'code' runs tests in a "
        "sandbox.",
        examples=["boxed"],
    )

    @model_validator(mode="after")
    def _check_keys(self) -> RewardKindSection:
        used = _keys_of(self.kind)
        for name in self.given:
            if name not in used:
                kinds = ", ".join(repr(kind) for kind in REWARD_KINDS if name in _keys_of(kind))
                raise ValueError(
                    f"{name} is not a key of kind={self.kind!r}, but of {kinds}; its keys are {', '.join(used)}"
                )
        try:
            self.build()
        except ConfigError as error:
            raise ValueError(str(error)) from None
        return self

    @property
    def given(self) -> dict[str, Any]:
        """The keys that are set, without `kind`."""
        return {name: value for name, value in self.model_dump(exclude={"kind"}).items() if value is not None}

    def build(self) -> RewardSpec:
        """Return the reward. Raise ConfigError for keys that contradict each other."""
        return spec_from({"kind": self.kind, **self.given})


_KEYS = {name: key for kind in REWARD_KINDS for name, key in _keys_of(kind).items()}

if TYPE_CHECKING:
    RewardSection: TypeAlias = RewardKindSection
else:
    RewardSection = create_model(
        "RewardSection",
        __base__=RewardKindSection,
        __doc__=RewardKindSection.__doc__,
        **{
            name: (Annotated[_annotation(key), Key(description=_description(name))], None)
            for name, key in _KEYS.items()
        },
    )


def reward_specs(sections: Sequence[RewardKindSection]) -> list[RewardSpec]:
    """Return the rewards of a run. Raise ConfigError if two have the same name, or all have weight 0."""
    rewards = [section.build() for section in sections]
    check_rewards(rewards)
    return rewards
