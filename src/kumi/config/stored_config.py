"""What a run folder says of a run that has begun; an earlier version may have written it.

`config.toml` spells out every key that the version knew which wrote it. A key that it lacks counts as what was in force
then: the key's default, which is to leave a run as it was without the key, or else what `BEFORE` says. `plan.json` says
which layout the run has, and why (see run_plan); folders of earlier versions have none.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kumi.config.load import from_dict
from kumi.config.run_plan import RunPlan, read_plan
from kumi.config.schema import PlanConfig, RunConfig
from kumi.errors import ConfigError, RefusedError
from kumi.files.untrusted import parse_toml, read_bytes

CONFIG = "config.toml"
NUMERICS = "precision.numerics"

# For each key whose default is not what earlier versions did: the keys, with their values, that were in force in runs
# which said nothing of them. Add an entry with every such key; tests/train/test_earlier_versions.py resumes a run of a
# version that knew none of them.
BEFORE: dict[str, dict[str, Any]] = {"optim.warmup_ratio": {"optim.warmup_steps": 0}, NUMERICS: {NUMERICS: "reference"}}


@dataclass(frozen=True)
class Begun:
    """A run that has begun: the configuration that is written in its folder, None in a new one, and its plan, None in a
    folder of a version without plans."""

    config: Mapping[str, Any] | None
    plan: RunPlan | None


def run_folder(config: PlanConfig) -> Path | None:
    """Return the folder of the run that `config` describes; None where it describes a plan only."""
    return None if config.train is None else Path(os.path.expanduser(config.train.out))


def read_begun(config: PlanConfig) -> Begun | None:
    """Return what the folder of `config` says of its run; None where none has begun there.

    Raise RefusedError where a file in it is damaged.
    """
    out = run_folder(config)
    if out is None or not (out / CONFIG).is_file():
        return None
    return Begun(read_stored(out), read_plan(out))


def in_force(config: RunConfig, begun: Begun | None) -> RunConfig:
    """Return `config` with what was in force when its run had `begun`, where its run file does not say otherwise."""
    if begun is None or begun.config is None:
        return config
    stored, written = _flat(begun.config), config.model_dump(mode="json", exclude_unset=True)
    explicit = _flat(written).keys() - ({NUMERICS} if config.precision.numerics == "auto" else set())
    for key, values in _lacking(stored):
        unchanged = all(stored.get(name, value) == value for name, value in values.items())
        if unchanged and not explicit & {key, *values}:
            _set_all(written, values)
    # A CPU goes on computing as it did, unless the run file pins something else.
    if config.precision.numerics == "auto" and NUMERICS in stored:
        _set_all(written, {NUMERICS: stored[NUMERICS]})
    return from_dict(written)


def load_stored(out: Path) -> RunConfig:
    """Return the configuration of the run in the folder `out`, with keys that it lacks as they were in force.

    Raise RefusedError where the file is damaged or not of this version's kind.
    """
    stored = read_stored(out)
    for _, values in _lacking(_flat(stored)):
        _set_all(stored, {key: value for key, value in values.items() if key not in _flat(stored)})
    try:
        return from_dict(stored)
    except ConfigError as error:
        raise RefusedError(
            f"{out / CONFIG}: this version of kumi does not read it ({error}); restore it, or use the version that "
            f"wrote it"
        ) from None


def read_stored(out: Path) -> dict[str, Any]:
    """Return the configuration in the folder `out` as it was written. Raise RefusedError where it is not TOML."""
    try:
        return parse_toml(read_bytes(out, CONFIG, RefusedError))
    except ValueError as error:
        raise RefusedError(f"{out / CONFIG} is damaged ({error}); restore it, or choose another train.out") from None


def _lacking(stored: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the entries of `BEFORE` whose key is not among the dotted keys `stored`."""
    return ((key, values) for key, values in BEFORE.items() if key not in stored)


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of a tree of tables by dotted key."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def _set_all(tree: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Set `values`, by dotted key, in a tree of tables."""
    for key, value in values.items():
        *sections, last = key.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[last] = value


def changes(stored: RunConfig, config: RunConfig) -> list[tuple[str, str]]:
    """Return every dotted key whose value differs between two configurations, with `key: old -> new`."""
    before, after = (_flat(config_.model_dump(mode="json", exclude_none=True)) for config_ in (stored, config))
    keys = [key for key in dict.fromkeys([*before, *after]) if before.get(key) != after.get(key)]
    return [(key, f"{key}: {before.get(key, 'unset')!r} -> {after.get(key, 'unset')!r}") for key in keys]
