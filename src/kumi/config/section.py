"""The base class of a run file's sections, and the types of its keys.

Keys that set a field of a spec dataclass take default and description from it (`spec_key`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import MISSING
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from kumi.errors import ConfigError
from kumi.units import parse_duration

# Larger counts are typing errors, and would keep the search for a layout busy for hours.
_MAX_COUNT = 10**12

# Strict types, as TOML has them: 4.0, "4" and true are not counts, and inf and nan are not numbers.
Positive = Annotated[int, Field(gt=0, le=_MAX_COUNT, strict=True)]
NotNegative = Annotated[int, Field(ge=0, le=_MAX_COUNT, strict=True)]
Number = Annotated[float, Field(strict=True)]
Fraction = Annotated[Number, Field(ge=0, le=1)]
Decay = Annotated[Number, Field(ge=0, lt=1)]
Switch = Annotated[bool, Field(strict=True)]
Text = Annotated[str, Field(min_length=1, pattern=r"^[^\x00]*$")]


def readable(parse: Callable[[str], object]) -> AfterValidator:
    """Return a validator that refuses text which `parse` cannot read, and leaves all other text as it is."""

    def check(text: str) -> str:
        try:
            parse(text)
        except ConfigError as error:
            raise ValueError(str(error)) from None
        return text

    return AfterValidator(check)


def duration(least: str, most: str) -> AfterValidator:
    """Return a validator that refuses text which is not a duration from `least` to `most`."""

    def parse(text: str) -> None:
        if not parse_duration(least) <= parse_duration(text) <= parse_duration(most):
            raise ConfigError(f"{text!r} is not a duration from {least} to {most}")

    return readable(parse)


def spec_key(spec: type[Any], name: str, default: Any = MISSING, examples: Sequence[Any] | None = None) -> Any:
    """Return the key of a run file that sets the field `name` of the dataclass `spec`, with that field's description.

    The default is the field's, unless the key has another representation of it, given as `default`. `examples`: values
    for the error message that the key is missing.
    """
    field = spec.__dataclass_fields__[name]
    if default is MISSING:
        default = ... if field.default is MISSING else field.default
    return Field(default, description=field.metadata["text"], examples=None if examples is None else list(examples))


class Section(BaseModel):
    """A table of a run file or of another TOML file. Unknown keys are refused."""

    # Build a validator when it is first used: a command needs only the validators of RunConfig or PlanConfig, and of
    # few other sections.
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, defer_build=True)
