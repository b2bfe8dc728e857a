"""Run files in and out: TOML with dotted overrides, unknown keys refused with a suggestion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from pydantic import ValidationError

from kumi.config.schema import PlanConfig, RunConfig
from kumi.config.validation_messages import sentences
from kumi.errors import ConfigError
from kumi.files import untrusted
from kumi.paths import looked_for

Kind = TypeVar("Kind", bound=PlanConfig)

# A run file, or its sections; `section.key=value` texts, or values by `section.key`.
RunFile: TypeAlias = str | Path | Mapping[str, Any]
Overrides: TypeAlias = Sequence[str] | Mapping[str, Any]


def load(path: RunFile, overrides: Overrides = ()) -> RunConfig:
    """Return the configuration of the run file at `path`, or of a mapping of sections, with overrides applied.

    Overrides are `section.key=value` texts, or a mapping from `section.key` to values. Raise ConfigError on anything
    unexpected.
    """
    written = _written(path, overrides)
    try:
        return _checked(RunConfig, written)
    except ConfigError as error:
        if _plannable(written):
            raise ConfigError(f"{error}; as it is, the file is enough for `kumi plan` only") from None
        raise


def _plannable(written: dict[str, Any]) -> bool:
    """Whether nothing is wrong but that what only a run needs is left out."""
    try:
        _checked(PlanConfig, written)
    except ConfigError:
        return False
    return not {"name", "data", "train"} <= set(written)


def load_plan(path: RunFile, overrides: Overrides = (), cluster: Mapping[str, Any] | None = None) -> PlanConfig:
    """As `load`, of a file that may leave out what only a run needs: a name, data and steps. `cluster` replaces the
    section of that name."""
    given = {} if cluster is None else {"cluster": dict(cluster)}
    return _checked(PlanConfig, with_overrides(_sections(path) | given, overrides))


def from_dict(written: dict[str, Any]) -> RunConfig:
    """The run that a nested dict describes. Raises ConfigError that names every wrong key."""
    return _checked(RunConfig, written)


def plan_from_dict(written: dict[str, Any]) -> PlanConfig:
    """The plan that a nested dict describes. Raises ConfigError that names every wrong key."""
    return _checked(PlanConfig, written)


def _written(path: RunFile, overrides: Overrides) -> dict[str, Any]:
    """Return what the TOML file at `path`, or a mapping, says as a nested dict, with `overrides` applied."""
    return with_overrides(_sections(path), overrides)


def _sections(path: RunFile) -> dict[str, Any]:
    """Return the sections of the TOML file at `path`, or a copy of a mapping of sections."""
    return deepcopy(dict(path)) if isinstance(path, Mapping) else read_toml(path)


def with_overrides(tree: dict[str, Any], overrides: Overrides) -> dict[str, Any]:
    """Return `tree` itself, with `overrides` applied."""
    values = overrides.items() if isinstance(overrides, Mapping) else map(_split, overrides)
    for key, value in values:
        _apply(tree, key, value)
    return tree


def read_toml(path: str | Path) -> dict[str, Any]:
    """Return the TOML run file at `path` as a nested dict."""
    file = Path(path)
    try:
        return untrusted.read_toml(file)
    except FileNotFoundError:
        raise ConfigError(f"{looked_for(file)}: no such run file; name an existing TOML file") from None
    except IsADirectoryError:
        raise ConfigError(f"{file} is a folder; {_files_to_name(file)}") from None
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) or "\0" in str(path):
            raise ConfigError(f"{str(path)!r} cannot be read ({error}); name a TOML run file") from None
        raise ConfigError(f"{file}: not valid TOML: {error}") from None


def _files_to_name(folder: Path) -> str:
    """Which files in `folder` the user may have meant."""
    names = sorted(str(file) for file in folder.glob("*.toml"))
    if names:
        return f"name a run file in it: {', '.join(names[:5])}{' ...' if len(names) > 5 else ''}"
    if (folder / "config.json").is_file():
        return (
            f"it holds a model, which can be planned: kumi plan {folder} --gpus 8xh100-sxm; to train it, write a run "
            f"file with kumi init, and set model.source to this folder"
        )
    return "it holds neither a TOML run file nor a model's config.json; name a run file, or write one with kumi init"


def _checked(kind: type[Kind], written: dict[str, Any]) -> Kind:
    try:
        return kind.model_validate(written)
    except ValidationError as error:
        raise ConfigError(sentences(error, kind)) from None


def json_schema() -> dict[str, Any]:
    """The JSON schema of run files, for editors."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **RunConfig.model_json_schema()}


def dump(config: PlanConfig) -> str:
    """`config` as TOML, every key spelled out except those that are unset."""
    import tomli_w

    return tomli_w.dumps(_plain(config.model_dump(mode="json", exclude_none=True)))


def _plain(value: Any) -> Any:
    """`value` without None, which TOML cannot say: a null inside an inline config.json means the key's absence."""
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
    child = node[_index(node, part, where)] if isinstance(node, list) else node.setdefault(part, {})
    if not isinstance(child, dict | list):
        raise ConfigError(f"{where}: holds {child!r}, not a section, so nothing can be set inside it")
    return child


def _index(items: list[Any], part: str, where: str) -> int:
    if not part.isdigit() or int(part) >= len(items):
        raise ConfigError(f"{where}: {part!r} is not an index; there are {len(items)}, counted from 0")
    return int(part)


def _value(text: str) -> Any:
    """`text` as a TOML value; what is not one is a string, so that paths need no quotes."""
    try:
        return untrusted.parse_toml(f"value = {text}".encode())["value"]
    except ValueError:
        return text
