"""Run files in and out: TOML with dotted overrides, unknown keys refused with a suggestion."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from kumi.config.schema import RunConfig
from kumi.errors import ConfigError


def load(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The run file at `path`, with `section.key=value` overrides applied. Raises ConfigError on anything unexpected."""
    file = Path(path)
    try:
        written = tomllib.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{file}: no such run file; name an existing TOML file") from None
    except IsADirectoryError:
        raise ConfigError(f"{file} is a folder; name a TOML run file, such as {file / 'run.toml'}") from None
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, OSError) or "\0" in str(path):
            raise ConfigError(f"{str(path)!r} cannot be read ({error}); name a TOML run file") from None
        raise ConfigError(f"{file}: not valid TOML: {error}") from None
    for override in overrides:
        _apply(written, override)
    return from_dict(written)


def from_dict(written: dict[str, Any]) -> RunConfig:
    """The run that a nested dict describes. Raises ConfigError that names every wrong key."""
    try:
        return RunConfig.model_validate(written)
    except ValidationError as error:
        raise ConfigError("; ".join(_sentence(item) for item in _innermost(error))) from None


def json_schema() -> dict[str, Any]:
    """The JSON schema of run files, for editors."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **RunConfig.model_json_schema()}


def dump(config: RunConfig) -> str:
    """`config` as TOML, every key spelled out except those that are unset."""
    import tomli_w

    return tomli_w.dumps(_plain(config.model_dump(mode="json", exclude_none=True)))


def _plain(value: Any) -> Any:
    """`value` without None, which TOML cannot say: a null inside an inline config.json means the key's absence."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items() if item is not None}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def _apply(tree: dict[str, Any], override: str) -> None:
    """Set `section.key=value` in `tree`; a number in the path is an index into a list."""
    key, equals, text = override.partition("=")
    path = key.strip().split(".")
    if not equals or not all(path):
        raise ConfigError(f"{override!r} is not an override; write section.key=value, such as optim.lr=2e-5")
    *parents, last = path
    node: Any = tree
    for depth, part in enumerate(parents):
        node = _child(node, part, ".".join(path[: depth + 1]))
    if isinstance(node, list):
        node[_index(node, last, key)] = _value(text)
    else:
        node[last] = _value(text)


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
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _innermost(error: ValidationError) -> list[dict[str, Any]]:
    """The errors of `error` without those that only follow from another."""
    items: list[dict[str, Any]] = [dict(item) for item in error.errors()]
    places = [item["loc"] for item in items]
    return [
        item
        for item in items
        if not any(place != item["loc"] and place[: len(item["loc"])] == item["loc"] for place in places)
        and not _other_branch(item)
    ]


# What pydantic adds to the place of an error inside `str | TrainedTokenizer`.
_TEXT_BRANCH, _TABLE_BRANCH = "constrained-str", "TrainedTokenizer"


def _other_branch(item: dict[str, Any]) -> bool:
    """Whether `item` only says that a table is no text, or that something else is no table, where both may stand."""
    if item["loc"][-1:] == (_TEXT_BRANCH,):
        return isinstance(item["input"], dict)
    return bool(item["loc"][-1:] == (_TABLE_BRANCH,))


# What a value should be, for the kinds of error that pydantic words for programmers.
_WANTED = {
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text in quotes",
    "string_too_short": "not empty",
    "string_pattern_mismatch": "text without null bytes",
    "tuple_type": "a list",
    "dict_type": "a table",
    "model_type": "a table of keys",
}


def _sentence(item: dict[str, Any]) -> str:
    """One validation error as `path: what is wrong; what to do`."""
    location = [part for part in item["loc"] if part not in (_TEXT_BRANCH, _TABLE_BRANCH)]
    path = ".".join(str(part) for part in location)
    if item["type"] == "extra_forbidden":
        return f"{path}: unknown key{_suggest(location)}"
    if item["type"] == "missing":
        return f"{path}: required, and not set"
    message = item["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    if item["type"] == "value_error":
        return f"{path}: {message}" if path else message
    if item["type"] in ("too_short", "too_long"):
        bound = "at least" if item["type"] == "too_short" else "at most"
        limit = item["ctx"].get("min_length", item["ctx"].get("max_length"))
        message = f"a list of {bound} {limit}"
    return f"{path}: {item['input']!r} is wrong, it should be {_WANTED.get(item['type'], message)}"


def _suggest(location: Sequence[str | int]) -> str:
    """ "; did you mean 'x'?" for the known key most like the last of `location`, or the known keys."""
    *parents, key = location
    model: Any = RunConfig
    for part in parents:
        if isinstance(part, int):
            continue
        model = _section(model.model_fields[part].annotation)
    names = list(model.model_fields)
    close = get_close_matches(str(key), names, n=1, cutoff=0.5)
    elsewhere = [name for name, field in RunConfig.model_fields.items() if _has_key(field.annotation, str(key))]
    if close:
        return f"; did you mean {close[0]!r}?"
    if elsewhere:
        return f"; did you mean '{elsewhere[0]}.{key}'?"
    return f"; known here: {', '.join(names)}"


def _section(annotation: Any) -> Any:
    """The section class inside an annotation such as tuple[SourceSection, ...] or str | TrainedTokenizer."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    inner = (_section(argument) for argument in getattr(annotation, "__args__", ()) if argument is not Ellipsis)
    return next((found for found in inner if found is not None), None)


def _has_key(annotation: Any, key: str) -> bool:
    section = _section(annotation)
    return section is not None and key in section.model_fields
