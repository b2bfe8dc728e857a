"""Pydantic's validation errors as sentences: key, expected value, actual value, and the nearest valid key."""

from __future__ import annotations

import json
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

from pydantic import BaseModel, ValidationError

from kumi.config.launch_section import LINE, VARIABLE
from kumi.config.run_sections import DATASET_ID, MODEL_ID


def describe_errors(error: ValidationError, root: type[BaseModel]) -> str:
    """Return all mistakes in `error`, which the validation of a `root` raised, separated by semicolons."""
    return "; ".join(_sentence(item, root) for item in _innermost(error))


def _innermost(error: ValidationError) -> list[dict[str, Any]]:
    """Return the errors in `error` without those that only follow from another one."""
    items: list[dict[str, Any]] = [dict(item) for item in error.errors()]
    places = [item["loc"] for item in items]
    return [
        item
        for item in items
        if not any(place != item["loc"] and place[: len(item["loc"])] == item["loc"] for place in places)
        and item["type"] != "default_factory_not_called"  # the default depends on a key with an error
        and not _other_branch(item)
    ]


# Parts that pydantic adds to the location of an error inside `str | TrainedTokenizer`.
_TEXT_BRANCH, _TABLE_BRANCH = "constrained-str", "TrainedTokenizer"


def _other_branch(item: dict[str, Any]) -> bool:
    """Return True if `item` only says that a table is not text, or a value not a table, where both are valid."""
    if item["loc"][-1:] == (_TEXT_BRANCH,):
        return isinstance(item["input"], dict)
    return bool(item["loc"][-1:] == (_TABLE_BRANCH,))


# Expected values, for types of errors whose message by pydantic is for programmers.
_EXPECTED = {
    "int_type": "be an integer",
    "float_type": "be a number",
    "bool_type": "be true or false",
    "string_type": "be text in quotes",
    "string_too_short": "not be empty",
    "tuple_type": "be a list",
    "dict_type": "be a table",
    "model_type": "be a table of keys",
}
# Pattern of a key's text -> the expected text.
_PATTERNS = {
    MODEL_ID: "be a hub id, org/name",
    DATASET_ID: "be a hub id, name or org/name",
    LINE: "be one line of text without control characters",
    VARIABLE: "be the name of an environment variable",
}


def _sentence(item: dict[str, Any], root: type[BaseModel]) -> str:
    """Return one validation error as `key: expected and actual value`."""
    location = [part for part in item["loc"] if part not in (_TEXT_BRANCH, _TABLE_BRANCH)]
    path = ".".join(str(part) for part in location)
    if item["type"] == "extra_forbidden":
        return f"{path}: unknown key{_suggest(location, root)}"
    if item["type"] == "missing":
        return f"{path}: required, but not set{_line_to_add(location, root)}"
    if item["type"] == "value_error":
        message = item["msg"].removeprefix("Value error, ")
        return f"{path}: {message}" if path else message
    value = str(item["input"]).lower() if isinstance(item["input"], bool) else repr(item["input"])
    return f"{path}: must {_expected(item)}, got {value}"


def _expected(item: dict[str, Any]) -> str:
    """Return the expected value as a phrase that follows "must"."""
    if item["type"] in ("too_short", "too_long"):
        bound = "at least" if item["type"] == "too_short" else "at most"
        limit = item["ctx"].get("min_length", item["ctx"].get("max_length"))
        return f"be a list of {bound} {limit}"
    if item["type"] == "string_pattern_mismatch":
        return _PATTERNS.get(item["ctx"]["pattern"], "be text without null bytes")
    return _EXPECTED.get(item["type"], f"be {item['msg'].removeprefix('Input should be ')}")


def _line_to_add(location: Sequence[str | int], root: type[BaseModel]) -> str:
    """Return `; add ...` with an example of the missing key or table at `location`, and where to write it.

    It is "" for keys without an example, which are not written by hand.
    """
    *parents, key = location
    field = _section_at(parents, root).model_fields[key]
    names = [str(part) for part in parents if isinstance(part, str)]
    if field.examples:
        entry = next((f"entry {part + 1} of {'.'.join(names)}" for part in parents if isinstance(part, int)), None)
        place = f"in {entry or '[' + '.'.join(names) + ']'}" if parents else "above the first table"
        return f"; add, for example, {key} = {_toml(field.examples[0])} {place}"
    section = _section(field.annotation)
    keys = {name: item.examples for name, item in section.model_fields.items()} if section else {}
    lines = [f"{name} = {_toml(examples[0])}" for name, examples in keys.items() if examples]
    return f"; add the table [{'.'.join([*names, str(key)])}] with, for example, {', '.join(lines)}" if lines else ""


def _toml(value: Any) -> str:
    """Return `value` as TOML in one line."""
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{key} = {_toml(item)}' for key, item in value.items())} }}"
    return f"[{', '.join(map(_toml, value))}]" if isinstance(value, list) else json.dumps(value)


def _section_at(parents: Sequence[str | int], root: type[BaseModel]) -> Any:
    """Return the section class of the keys whose location begins with `parents`."""
    model: Any = root
    for part in parents:
        if isinstance(part, str):
            model = _section(model.model_fields[part].annotation)
    return model


def _suggest(location: Sequence[str | int], root: type[BaseModel]) -> str:
    """Return `; did you mean 'x'?` with the valid key most similar to the end of `location`, or all valid keys."""
    *parents, key = location
    model = _section_at(parents, root)
    names = list(model.model_fields)
    close = get_close_matches(str(key), names, n=1, cutoff=0.5)
    elsewhere = [name for name, field in root.model_fields.items() if _has_key(field.annotation, str(key))]
    if close:
        return f"; did you mean {close[0]!r}?"
    if elsewhere:
        return f"; did you mean '{elsewhere[0]}.{key}'?"
    return f"; valid keys are {', '.join(names)}"


def _section(annotation: Any) -> Any:
    """Return the section class inside an annotation such as tuple[SourceSection, ...] or str | TrainedTokenizer."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    inner = (_section(argument) for argument in getattr(annotation, "__args__", ()) if argument is not Ellipsis)
    return next((section for section in inner if section is not None), None)


def _has_key(annotation: Any, key: str) -> bool:
    section = _section(annotation)
    return section is not None and key in section.model_fields
