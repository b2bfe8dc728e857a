"""Sections of a run file whose key `kind` decides which other keys they have: [objective] and the tables [[rewards]].

A kind is a dataclass, and its fields are its keys, so that a new kind needs no change here. The section has the keys of
all kinds, and refuses a key that its own kind does not use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields
from typing import Annotated, Any, ClassVar

from pydantic import Field as Key
from pydantic import create_model, model_validator

from kumi.config.section import Section
from kumi.errors import ConfigError


class KindSection(Section):
    """A section with a `kind`. `kinds`: the dataclass of each kind, by the kind's name."""

    kinds: ClassVar[Mapping[str, type[Any]]]
    kind: str

    @model_validator(mode="after")
    def _check_keys(self) -> KindSection:
        """Refuse keys that the kind does not use, and values that contradict each other."""
        used = _keys_of(self.kinds[self.kind])
        for name in self.given:
            if name not in used:
                kinds = ", ".join(repr(kind) for kind, of_kind in self.kinds.items() if name in _keys_of(of_kind))
                keys = f"its keys are {', '.join(used)}" if used else "it has no other key"
                raise ValueError(f"{name} is not a key of kind={self.kind!r}, but of {kinds}; {keys}")
        try:
            self.build()
        except ConfigError as error:
            # `describe_errors` puts the section before each message, and an objective's message already begins with it.
            raise ValueError(str(error).removeprefix("objective.")) from None
        return self

    @property
    def given(self) -> dict[str, Any]:
        """The keys that are set, without `kind`."""
        return {name: value for name, value in self.model_dump(exclude={"kind"}).items() if value is not None}

    def build(self) -> Any:
        """Return the object that the section describes. Raise ConfigError for keys that contradict each other."""
        return self.kinds[self.kind](**self.given)


def with_keys_of_kinds(name: str, base: type[KindSection], annotate: Callable[[Field[Any]], Any]) -> Any:
    """Return a section class called `name`: `base` with the keys of all its kinds. A key is `annotate(key)` or None."""
    keys = {key.name: key for kind in base.kinds.values() for key in fields(kind)}
    definitions: dict[str, Any] = {
        key: (Annotated[annotate(field) | None, Key(description=_description(base.kinds, key))], None)
        for key, field in keys.items()
    }
    return create_model(name, __base__=base, __doc__=base.__doc__, **definitions)


def _keys_of(kind: type[Any]) -> dict[str, Field[Any]]:
    """Return the keys of `kind` by name."""
    return {key.name: key for key in fields(kind)}


def _description(kinds: Mapping[str, type[Any]], name: str) -> str:
    """Return the description of the key `name`, with the kinds that use it and their defaults."""
    of_kind = {kind: _keys_of(kinds[kind])[name] for kind in kinds if name in _keys_of(kinds[kind])}
    texts: dict[str, dict[Any, list[str]]] = {}  # text -> default -> kinds
    for kind, key in of_kind.items():
        assert key.default is not MISSING, "a key of a kind has a default"
        texts.setdefault(key.metadata["text"], {}).setdefault(key.default, []).append(f"`{kind}`")
    everywhere = len(of_kind) == len(kinds) and len(texts) == 1
    return " ".join(_with_uses(text, defaults, everywhere=everywhere) for text, defaults in texts.items())


def _with_uses(text: str, kinds_of: Mapping[Any, list[str]], *, everywhere: bool) -> str:
    """Return `text` with the uses of a key in brackets, such as "A threshold (`grpo`, `ppo`: 0.2; `cispo`: 0.5)."

    `kinds_of`: default value -> the kinds with that default. `everywhere`: all kinds use the key with this
    text, so no kind is named.
    """
    uses = []
    for default, kinds in kinds_of.items():
        value = "" if default in (None, "") else f"{default:g}" if isinstance(default, int | float) else f"'{default}'"
        uses.append(": ".join(filter(None, ["" if everywhere else ", ".join(kinds), value])))
    listed = "; ".join(filter(None, uses))
    return f"{text.rstrip('.')} ({listed})." if listed else text
