"""Read and write run files: TOML with dotted overrides. Unknown keys are refused with a suggestion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from pydantic import ValidationError

from kumi.config.schema import PlanConfig, RunConfig
from kumi.config.validation_messages import describe_errors
from kumi.errors import ConfigError
from kumi.files import untrusted
from kumi.paths import shown_path

_Config = TypeVar("_Config", bound=PlanConfig)

# The path of a run file, or its sections.
RunFile: TypeAlias = str | Path | Mapping[str, Any]
# `section.key=value` texts, or values by `section.key`.
Overrides: TypeAlias = Sequence[str] | Mapping[str, Any]


def load(path: RunFile, overrides: Overrides = ()) -> RunConfig:
    """Return the configuration of the run file at `path`, or of a mapping of sections, with overrides applied.

    Overrides are `section.key=value` texts, or a mapping from `section.key` to values. Raise ConfigError that names
    every wrong or missing key.
    """
    written = _written(path, overrides)
    try:
        return _checked(RunConfig, written)
    except ConfigError as error:
        if _plannable(written):
            raise ConfigError(f"{error}; without these keys the file is valid for `kumi plan` only") from None
        raise


def _plannable(written: dict[str, Any]) -> bool:
    """Return True if `written` is a valid plan and lacks only keys that a run needs."""
    try:
        _checked(PlanConfig, written)
    except ConfigError:
        return False
    return not {"name", "data", "train"} <= set(written)


def load_plan(path: RunFile, overrides: Overrides = (), cluster: Mapping[str, Any] | None = None) -> PlanConfig:
    """Return the configuration for a plan. This is like `load`, but name, [data] and [train] are optional.

    `cluster` replaces the section [cluster].
    """
    machines = {} if cluster is None else {"cluster": dict(cluster)}
    return _checked(PlanConfig, with_overrides(_sections(path) | machines, overrides))


def load_run_or_plan(path: RunFile, overrides: Overrides = ()) -> RunConfig | PlanConfig:
    """Return the run of a file with [data] or [train], as `load` does, and else its plan, as `load_plan` does."""
    written = _written(path, overrides)
    return load(written) if {"data", "train"} & set(written) else _checked(PlanConfig, written)


def from_dict(written: dict[str, Any]) -> RunConfig:
    """Return the run that a nested dict describes. Raise ConfigError that names every wrong or missing key."""
    return _checked(RunConfig, written)


def plan_from_dict(written: dict[str, Any]) -> PlanConfig:
    """Return the plan that a nested dict describes. Raise ConfigError that names every wrong or missing key."""
    return _checked(PlanConfig, written)


def _written(path: RunFile, overrides: Overrides) -> dict[str, Any]:
    """Return the TOML file at `path`, or a mapping, as a nested dict with `overrides` applied."""
    return with_overrides(_sections(path), overrides)


def _sections(path: RunFile) -> dict[str, Any]:
    """Return the sections of the TOML file at `path`, or a copy of a mapping of sections."""
    return deepcopy(dict(path)) if isinstance(path, Mapping) else read_toml(path)


def with_overrides(tree: dict[str, Any], overrides: Overrides) -> dict[str, Any]:
    """Apply `overrides` to `tree` in place and return it."""
    values = overrides.items() if isinstance(overrides, Mapping) else map(_split, overrides)
    for key, value in values:
        _apply(tree, key, value)
    return tree


def read_toml(path: str | Path) -> dict[str, Any]:
    """Return the TOML run file at `path` as a nested dict. Raise ConfigError if it cannot be read."""
    file = Path(path)
    try:
        return untrusted.read_toml(file)
    except FileNotFoundError:
        raise ConfigError(f"{shown_path(file)}: no such run file; name an existing TOML file") from None
    except IsADirectoryError:
        raise ConfigError(f"{file} is a folder; {_files_to_name(file)}") from None
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) or "\0" in str(path):
            raise ConfigError(f"{str(path)!r} cannot be read ({error}); name a TOML run file") from None
        raise ConfigError(f"{file}: not valid TOML ({error}); correct the file") from None


def _files_to_name(folder: Path) -> str:
    """Return the remedy for a folder given as a run file: the run files in it, or how to write one."""
    names = sorted(str(file) for file in folder.glob("*.toml"))
    if names:
        return f"name a run file in it: {', '.join(names[:5])}{' ...' if len(names) > 5 else ''}"
    if (folder / "config.json").is_file():
        return (
            f"it holds a model, not a run file; plan it with kumi plan {folder} --gpus 8xh100-sxm, or train it with a "
            f"run file from kumi init whose model.source is this folder"
        )
    return "it holds neither a TOML run file nor a model's config.json; name a run file, or write one with kumi init"


def _checked(kind: type[_Config], written: dict[str, Any]) -> _Config:
    """Return the configuration of the class `kind` with the sections `written`. Raise ConfigError with all mistakes."""
    try:
        return kind.model_validate(written)
    except ValidationError as error:
        raise ConfigError(describe_errors(error, kind)) from None


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of run files, for editors."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **RunConfig.model_json_schema()}


def dump(config: PlanConfig) -> str:
    """Return `config` as TOML with every key, except unset ones."""
    import tomli_w

    return tomli_w.dumps(_plain(config.model_dump(mode="json", exclude_none=True)))


def _plain(value: Any) -> Any:
    """Return `value` without None, which TOML lacks; a null in an inline config.json means that the key is absent."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items() if item is not None}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def _split(override: str) -> tuple[str, Any]:
    """Return the key and the value of the text `section.key=value`."""
    key, equals, text = override.partition("=")
    if not equals or not all(key.strip().split(".")):
        raise ConfigError(f"{override!r} is not an override; write section.key=value, such as optim.lr=2e-5")
    return key.strip(), _value(text)


def _apply(tree: dict[str, Any], key: str, value: Any) -> None:
    """Set the dotted `key` in `tree` to `value`; a number in the path is an index into a list."""
    *parents, last = path = key.split(".")
    node: Any = tree
    for depth, part in enumerate(parents):
        node = _child(node, part, ".".join(path[: depth + 1]))
    if isinstance(node, list):
        node[_index(node, last, key)] = value
    else:
        node[last] = value


def _child(node: Any, part: str, where: str) -> Any:
    """Return the table or list at `part` of `node`; a missing table is created."""
    child = node[_index(node, part, where)] if isinstance(node, list) else node.setdefault(part, {})
    if not isinstance(child, dict | list):
        raise ConfigError(f"{where} is {child!r}, not a section; set a key of a section, such as optim.lr=2e-5")
    return child


def _index(items: list[Any], part: str, where: str) -> int:
    if not part.isdigit() or int(part) >= len(items):
        raise ConfigError(f"{where}: {part!r} is not an index of this list; use 0 to {len(items) - 1}")
    return int(part)


def _value(text: str) -> Any:
    """Return `text` as a TOML value; any other text is a string, so paths need no quotes."""
    try:
        return untrusted.parse_toml(f"value = {text}".encode())["value"]
    except ValueError:
        return text
