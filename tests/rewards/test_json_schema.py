"""Validation by JSON schemas."""

import pytest

from kumi.rewards.json_schema import SchemaError, is_valid

LIST = {
    "$ref": "#/$defs/node",
    "$defs": {"node": {"properties": {"next": {"$ref": "#/$defs/node"}, "n": {"type": "integer"}}}},
}


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        (True, [1], []),
        (False, [], [1, None]),
        ({"type": "integer"}, [1, 1.0], [1.5, True, "1", None]),
        ({"type": ["null", "boolean"]}, [None, False], [0, ""]),
        ({"type": "number"}, [1, 0.5], [True]),
        ({"enum": [1, "a", None]}, [1.0, "a", None], [True, "b"]),
        ({"const": {"a": [1]}}, [{"a": [1.0]}], [{"a": [True]}]),
        ({"multipleOf": 0.1}, [0.3, 2, "x"], [0.25]),
        ({"minimum": 1, "exclusiveMaximum": 3}, [1, 2.9, "x"], [0.9, 3]),
        ({"exclusiveMinimum": 1, "maximum": 3}, [1.1, 3], [1, 3.1]),
        ({"minLength": 2, "maxLength": 3, "pattern": "^a"}, ["ab", 7], ["a", "abcd", "ba"]),
        ({"minItems": 1, "maxItems": 2, "uniqueItems": True}, [[1], [1, True]], [[], [1, 2, 3], [1, 1.0]]),
        ({"prefixItems": [{"type": "string"}], "items": {"type": "integer"}}, [["a", 1], []], [[1], ["a", "b"]]),
        ({"contains": {"const": 1}, "maxContains": 1}, [[1, 2]], [[2], [1, 1]]),
        (
            {"properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False},
            [{"a": 1}, "x"],
            [{}, {"a": "1"}, {"a": 1, "b": 2}],
        ),
        (
            {"patternProperties": {"^x": {"type": "integer"}}, "additionalProperties": {"type": "string"}},
            [{"x1": 1, "y": "a"}],
            [{"x1": "a"}, {"y": 1}],
        ),
        ({"propertyNames": {"maxLength": 1}, "minProperties": 1, "maxProperties": 2}, [{"a": 1}], [{}, {"ab": 1}]),
        ({"dependentRequired": {"a": ["b"]}}, [{"b": 1}, {"a": 1, "b": 1}], [{"a": 1}]),
        ({"dependentSchemas": {"a": {"required": ["b"]}}}, [{}, {"a": 1, "b": 1}], [{"a": 1}]),
        ({"allOf": [{"minimum": 1}, {"maximum": 2}]}, [1], [0, 3]),
        ({"anyOf": [{"type": "string"}, {"minimum": 2}]}, ["a", 2], [1]),
        ({"oneOf": [{"multipleOf": 2}, {"multipleOf": 3}]}, [2, 3], [6, 1]),
        ({"not": {"type": "null"}}, [0], [None]),
        ({"if": {"type": "string"}, "then": {"minLength": 1}, "else": {"minimum": 5}}, ["a", 5], ["", 4]),
        (LIST, [{"n": 1, "next": {"n": 2}}], [{"next": {"next": {"n": "2"}}}]),
        ({"title": "x", "format": "email"}, ["not a mail"], []),
    ],
)
def test_values_are_valid(schema, valid, invalid):
    assert [value for value in valid if not is_valid(value, schema)] == []
    assert [value for value in invalid if is_valid(value, schema)] == []


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ([], "an object, true or false"),
        ({"typ": "string"}, "'typ' is not supported"),
        ({"type": "text"}, "'text' is unknown"),
        ({"$ref": "http://example.com/schema"}, "leads out of the schema"),
        ({"$ref": "#/$defs/none"}, "leads nowhere"),
        ({"$ref": "#"}, "refers to itself"),
        ({"minimum": "1"}, "wrong value"),
    ],
)
def test_a_wrong_schema_is_refused(schema, reason):
    with pytest.raises(SchemaError, match=reason):
        is_valid(1, schema)
