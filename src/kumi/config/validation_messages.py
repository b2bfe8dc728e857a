"""What pydantic found wrong, as sentences: where, which value, why, and the nearest known key."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

from pydantic import BaseModel, ValidationError


def sentences(error: ValidationError, root: type[BaseModel]) -> str:
    """Every mistake that `error` found in what should be a `root`, parted by semicolons."""
    return "; ".join(_sentence(item, root) for item in _innermost(error))


def _innermost(error: ValidationError) -> list[dict[str, Any]]:
    """The errors of `error` without those that only follow from another."""
    items: list[dict[str, Any]] = [dict(item) for item in error.errors()]
    places = [item["loc"] for item in items]
    return [
        item
        for item in items
        if not any(place != item["loc"] and place[: len(item["loc"])] == item["loc"] for place in places)
        and item["type"] != "default_factory_not_called"  # it follows from a wrong key that the default depends on
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


def _sentence(item: dict[str, Any], root: type[BaseModel]) -> str:
    """One validation error as `path: what is wrong; what to do`."""
    location = [part for part in item["loc"] if part not in (_TEXT_BRANCH, _TABLE_BRANCH)]
    path = ".".join(str(part) for part in location)
    if item["type"] == "extra_forbidden":
        return f"{path}: unknown key{_suggest(location, root)}"
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


def _suggest(location: Sequence[str | int], root: type[BaseModel]) -> str:
    """ "; did you mean 'x'?" for the known key most like the last of `location`, or the known keys."""
    *parents, key = location
    model: Any = root
    for part in parents:
        if isinstance(part, int):
            continue
        model = _section(model.model_fields[part].annotation)
    names = list(model.model_fields)
    close = get_close_matches(str(key), names, n=1, cutoff=0.5)
    elsewhere = [name for name, field in root.model_fields.items() if _has_key(field.annotation, str(key))]
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
