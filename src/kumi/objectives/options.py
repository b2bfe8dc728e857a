"""Checks that an option of an objective has a possible value."""

from __future__ import annotations

from kumi.errors import ConfigError


def check_option(valid: bool, name: str, value: object, requirement: str) -> None:
    """Raise ConfigError unless `valid`: `value` of the key `name` of [objective] does not meet `requirement`."""
    if not valid:
        raise ConfigError(f"objective.{name}={value!r} must be {requirement}")


def check_not_negative(**values: float) -> None:
    """Raise ConfigError if one of the options is below 0."""
    for name, value in values.items():
        check_option(value >= 0, name, value, "at least 0")


def check_positive(**values: float) -> None:
    """Raise ConfigError unless all of the options are above 0."""
    for name, value in values.items():
        check_option(value > 0, name, value, "above 0")
