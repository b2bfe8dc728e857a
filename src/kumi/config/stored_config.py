"""Read the run folder of a run that has started, possibly written by an earlier version.

`config.toml` contains every key of the version that wrote it. For a missing key, the value that was in
force at that time is the one in `EARLIER_VALUES`, or else today's default, which changes nothing for such a run.
`plan.json` contains the layout (see `run_plan`); folders of earlier versions lack it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kumi.config.load import from_dict
from kumi.config.run_plan import RunPlan, read_plan
from kumi.config.schema import PlanConfig, RunConfig
from kumi.errors import ConfigError, RefusedError
from kumi.files.run_names import CONFIG_FILE
from kumi.files.untrusted import parse_toml, read_bytes
from kumi.remote.cache_folder import local_run_folder

_NUMERICS_KEY, _KERNELS_KEY = "precision.numerics", "precision.kernels"

# Keys whose default differs from the behaviour of earlier versions -> the keys and values that reproduce it. A new key
# of this kind needs an entry here; tests/train/test_earlier_versions.py resumes a run of a version without these keys.
EARLIER_VALUES: dict[str, dict[str, Any]] = {
    "optim.warmup_ratio": {"optim.warmup_steps": 0},
    _NUMERICS_KEY: {_NUMERICS_KEY: "reference"},
    _KERNELS_KEY: {_KERNELS_KEY: "torch"},
}


@dataclass(frozen=True)
class StoredRun:
    """The content of the folder of a run that has started.

    `config`: its config.toml, None in a new folder.
    `plan`: its plan.json, None if an earlier version wrote the folder.
    """

    config: Mapping[str, Any] | None
    plan: RunPlan | None


def run_folder(config: PlanConfig) -> Path | None:
    """Return the run folder of `config`; None if it is only a plan."""
    return None if config.train is None else local_run_folder(config.train.out)


def read_stored_run(config: PlanConfig) -> StoredRun | None:
    """Return the content of the run folder of `config`; None if no run has started there.

    Raise RefusedError if one of its files is damaged.
    """
    out = run_folder(config)
    if out is None or not (out / CONFIG_FILE).is_file():
        return None
    return StoredRun(read_stored_toml(out), read_plan(out))


def with_stored_values(config: RunConfig, stored: StoredRun | None) -> RunConfig:
    """Return `config` with the values of the run's first start where later versions have other defaults, and with its
    numerics, for keys that the run file does not set."""
    if stored is None or stored.config is None:
        return config
    before, written = _flat(stored.config), config.model_dump(mode="json", exclude_unset=True)
    asked = {_NUMERICS_KEY: config.precision.numerics, _KERNELS_KEY: config.precision.kernels}
    automatic = {key for key, value in asked.items() if value == "auto"}
    explicit = _flat(written).keys() - automatic
    for key, values in _missing(before):
        unchanged = all(before.get(name, value) == value for name, value in values.items())
        if unchanged and not explicit & {key, *values}:
            _set_all(written, values)
    # The numerics stay, unless the run file pins others.
    _set_all(written, {key: before[key] for key in automatic if key in before})
    return from_dict(written)


def load_stored_config(out: Path) -> RunConfig:
    """Return the configuration of the run in the folder `out`; missing keys have the values that were in force then.

    Raise RefusedError if the file is damaged or this version cannot read it.
    """
    stored = read_stored_toml(out)
    for _, values in _missing(_flat(stored)):
        _set_all(stored, {key: value for key, value in values.items() if key not in _flat(stored)})
    try:
        return from_dict(stored)
    except ConfigError as error:
        raise RefusedError(
            f"{out / CONFIG_FILE} is not valid in this version of kumi ({error}); restore the file, or use the version "
            f"that wrote it"
        ) from None


def read_stored_toml(out: Path) -> dict[str, Any]:
    """Return the config.toml in the folder `out` as written. Raise RefusedError if it is not TOML."""
    try:
        return parse_toml(read_bytes(out, CONFIG_FILE, RefusedError))
    except ValueError as error:
        raise RefusedError(
            f"{out / CONFIG_FILE} is damaged ({error}); restore it, or choose another train.out"
        ) from None


def _missing(stored: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the entries of `EARLIER_VALUES` whose key is not among the dotted keys `stored`."""
    return ((key, values) for key, values in EARLIER_VALUES.items() if key not in stored)


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


def changed_keys(stored: RunConfig, config: RunConfig) -> list[tuple[str, str]]:
    """Return (dotted key, `key: old -> new`) for every key whose value differs between two configurations."""
    before, after = (_flat(run.model_dump(mode="json", exclude_none=True)) for run in (stored, config))
    keys = [key for key in dict.fromkeys([*before, *after]) if before.get(key) != after.get(key)]
    return [(key, f"{key}: {before.get(key, 'unset')!r} -> {after.get(key, 'unset')!r}") for key in keys]
