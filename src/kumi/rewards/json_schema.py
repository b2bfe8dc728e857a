"""Validation by JSON schemas (draft 2020-12), without a package for it.

Every keyword of the draft's core, applicator and validation vocabularies is checked, except `$dynamicRef`,
`unevaluatedItems`, `unevaluatedProperties`, and a `$ref` out of the schema; a schema with one of these, or with an
unknown keyword, is refused. `format` says nothing about validity, as the draft specifies.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

Schema = bool | Mapping[str, Any]
# A `$ref` -> the schema to which it refers.
Resolve = Callable[[str], Schema]

# Keywords that are allowed and that no function of `_KEYWORDS` checks.
_ANNOTATIONS = frozenset(
    {"$schema", "$id", "$comment", "$defs", "definitions", "$anchor", "title", "description", "default", "examples"}
    | {"deprecated", "readOnly", "writeOnly", "format", "contentEncoding", "contentMediaType", "contentSchema"}
    # The functions of the keywords `if` and `contains` read these.
    | {"then", "else", "minContains", "maxContains"}
)
_TYPES: dict[str, Callable[[Any], bool]] = {
    "null": lambda value: value is None,
    "boolean": lambda value: isinstance(value, bool),
    "string": lambda value: isinstance(value, str),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
    "number": lambda value: _is_number(value),
    "integer": lambda value: _is_number(value) and (isinstance(value, int) or value.is_integer()),
}
# Levels of schemas within schemas, by `$ref` or by keywords such as `allOf`, beyond which a schema is taken to refer to
# itself without end.
_DEPTH = 100


class SchemaError(ValueError):
    """A schema that is wrong, or that has a keyword which is not supported."""


def is_valid(value: Any, schema: Any) -> bool:
    """Return True if the JSON value `value` is valid under `schema`. Raise SchemaError for a wrong schema."""
    root = _checked(schema)

    def resolve(reference: str) -> Schema:
        if not reference.startswith("#"):
            raise SchemaError(f"$ref {reference!r} leads out of the schema; write the definition into its $defs")
        node: Any = root
        for part in reference[1:].split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            node = node[int(name)] if isinstance(node, list) and name.isdigit() else node.get(name)
            if node is None:
                raise SchemaError(f"$ref {reference!r} leads nowhere")
        return _checked(node)

    try:
        return _valid(value, root, resolve, 0)
    except SchemaError:
        raise
    except (TypeError, AttributeError, KeyError, IndexError, re.error) as error:
        raise SchemaError(f"a keyword has a wrong value ({error})") from None


def _checked(schema: Any) -> Schema:
    """Return `schema`. Raise SchemaError unless it is an object with supported keywords, true or false."""
    if not isinstance(schema, bool | dict):
        raise SchemaError(f"a schema is an object, true or false, not {type(schema).__name__}")
    if isinstance(schema, dict):
        unknown = sorted(schema.keys() - _KEYWORDS.keys() - _ANNOTATIONS)
        if unknown:
            raise SchemaError(f"the keyword {unknown[0]!r} is not supported")
    return schema


def _valid(value: Any, schema: Any, resolve: Resolve, depth: int) -> bool:
    schema = _checked(schema)
    if depth > _DEPTH:
        raise SchemaError("the schema refers to itself without end")
    if isinstance(schema, bool):
        return schema

    def below(inner_value: Any, inner_schema: Any) -> bool:
        return _valid(inner_value, inner_schema, resolve, depth + 1)

    return all(
        _KEYWORDS[keyword](value, argument, schema, below)
        if keyword != "$ref"
        else _valid(value, resolve(argument), resolve, depth + 1)
        for keyword, argument in schema.items()
        if keyword in _KEYWORDS
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _same(left: Any, right: Any) -> bool:
    """Return True if two JSON values are equal: 1 and 1.0 are, 1 and true are not."""
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    if isinstance(left, list) and isinstance(right, list):
        return len(left) == len(right) and all(_same(a, b) for a, b in zip(left, right, strict=True))
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(_same(left[key], right[key]) for key in left)
    return bool(left == right) if type(left) is type(right) or (_is_number(left) and _is_number(right)) else False


# (value, argument of the keyword, the schema with the keyword, `below`) -> True if the value is valid. `below` returns
# True if a value, such as an item of a list, is valid under a schema inside of the schema.
Keyword = Callable[[Any, Any, Mapping[str, Any], Callable[[Any, Any], bool]], bool]


def _for_type(kind: type | tuple[type, ...], check: Callable[[Any, Any], bool]) -> Keyword:
    """Return the keyword that checks values of `kind`; values of other kinds are valid."""
    return lambda value, argument, schema, below: not isinstance(value, kind) or check(value, argument)


def _for_numbers(check: Callable[[Any, Any], bool]) -> Keyword:
    """Return the keyword that checks numbers; other values are valid."""
    return lambda value, argument, schema, below: not _is_number(value) or check(value, argument)


def _type(value: Any, argument: Any, schema: Any, below: Any) -> bool:
    names = [argument] if isinstance(argument, str) else argument
    unknown = next((name for name in names if name not in _TYPES), None)
    if unknown is not None:
        raise SchemaError(f"the type {unknown!r} is unknown")
    return any(_TYPES[name](value) for name in names)


def _multiple(value: Any, argument: Any) -> bool:
    if isinstance(value, float) and not math.isfinite(value):
        return False
    # By their decimal digits: 0.3 is a multiple of 0.1.
    return Fraction(str(value)) % Fraction(str(argument)) == 0


def _properties(value: Any, argument: Any, schema: Any, below: Any) -> bool:
    if not isinstance(value, dict):
        return True
    return all(below(value[name], inner) for name, inner in argument.items() if name in value)


def _pattern_properties(value: Any, argument: Any, schema: Any, below: Any) -> bool:
    if not isinstance(value, dict):
        return True
    return all(
        below(item, inner)
        for pattern, inner in argument.items()
        for name, item in value.items()
        if re.search(pattern, name)
    )


def _additional(value: Any, argument: Any, schema: Any, below: Any) -> bool:
    if not isinstance(value, dict):
        return True
    listed, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
    return all(
        below(item, argument)
        for name, item in value.items()
        if name not in listed and not any(re.search(pattern, name) for pattern in patterns)
    )


def _dependent(value: Any, argument: Any, schema: Any, below: Any) -> bool:
    if not isinstance(value, dict):
        return True
    return all(set(names) <= value.keys() for name, names in argument.items() if name in value)


def _dependent_schemas(value: Any, argument: Any, schema: Any, below: Any) -> bool:
    return not isinstance(value, dict) or all(below(value, inner) for name, inner in argument.items() if name in value)


def _prefix(value: Any, argument: Any, schema: Any, below: Any) -> bool:
    return not isinstance(value, list) or all(below(item, inner) for item, inner in zip(value, argument, strict=False))


def _items(value: Any, argument: Any, schema: Any, below: Any) -> bool:
    start = len(schema.get("prefixItems", ()))
    return not isinstance(value, list) or all(below(item, argument) for item in value[start:])


def _contains(value: Any, argument: Any, schema: Any, below: Any) -> bool:
    if not isinstance(value, list):
        return True
    count = sum(below(item, argument) for item in value)
    return bool(schema.get("minContains", 1) <= count <= schema.get("maxContains", len(value)))


def _unique(value: list[Any], argument: Any) -> bool:
    return not argument or not any(_same(item, other) for n, item in enumerate(value) for other in value[:n])


def _if(value: Any, argument: Any, schema: Any, below: Any) -> bool:
    branch = "then" if below(value, argument) else "else"
    return branch not in schema or below(value, schema[branch])


_KEYWORDS: dict[str, Keyword] = {
    "$ref": lambda value, argument, schema, below: True,  # `_valid` resolves it
    "type": _type,
    "enum": lambda value, argument, schema, below: any(_same(value, item) for item in argument),
    "const": lambda value, argument, schema, below: _same(value, argument),
    "multipleOf": _for_numbers(_multiple),
    "minimum": _for_numbers(lambda value, bound: value >= bound),
    "maximum": _for_numbers(lambda value, bound: value <= bound),
    "exclusiveMinimum": _for_numbers(lambda value, bound: value > bound),
    "exclusiveMaximum": _for_numbers(lambda value, bound: value < bound),
    "minLength": _for_type(str, lambda value, bound: len(value) >= bound),
    "maxLength": _for_type(str, lambda value, bound: len(value) <= bound),
    "pattern": _for_type(str, lambda value, pattern: re.search(pattern, value) is not None),
    "minItems": _for_type(list, lambda value, bound: len(value) >= bound),
    "maxItems": _for_type(list, lambda value, bound: len(value) <= bound),
    "uniqueItems": _for_type(list, _unique),
    "minProperties": _for_type(dict, lambda value, bound: len(value) >= bound),
    "maxProperties": _for_type(dict, lambda value, bound: len(value) <= bound),
    "required": _for_type(dict, lambda value, names: set(names) <= value.keys()),
    "properties": _properties,
    "patternProperties": _pattern_properties,
    "additionalProperties": _additional,
    "propertyNames": lambda value, argument, schema, below: (
        not isinstance(value, dict) or all(below(name, argument) for name in value)
    ),
    "dependentRequired": _dependent,
    "dependentSchemas": _dependent_schemas,
    "prefixItems": _prefix,
    "items": _items,
    "contains": _contains,
    "allOf": lambda value, argument, schema, below: all(below(value, inner) for inner in argument),
    "anyOf": lambda value, argument, schema, below: any(below(value, inner) for inner in argument),
    "oneOf": lambda value, argument, schema, below: sum(below(value, inner) for inner in argument) == 1,
    "not": lambda value, argument, schema, below: not below(value, argument),
    "if": _if,
}
