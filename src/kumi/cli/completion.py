"""Shell completion with argcomplete: verbs, flags, files, and run-file keys as KEY=VALUE.

eval "$(register-python-argcomplete kumi)"        # bash, zsh; argcomplete's documentation has fish and others
"""

from __future__ import annotations

import argparse
import os
from typing import Any

# The environment variable that is set when the shell asks for completions.
_VARIABLE = "_ARGCOMPLETE"


def complete(parser: argparse.ArgumentParser) -> None:
    """Answer the shell and exit if it asks for completions; otherwise do nothing."""
    if _VARIABLE not in os.environ:
        return
    import argcomplete

    argcomplete.autocomplete(parser)


def complete_override(prefix: str, **_: Any) -> list[str]:
    """Return the run-file keys, each with `=`; for a complete key, its listed values, if any."""
    import json

    from kumi.config import json_schema

    schema = json_schema()
    key, equals, _value = prefix.partition("=")
    keys = dict(_keys(schema, schema["properties"]))
    if not equals:
        return [f"{name}=" for name in keys]
    return [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for value in keys.get(key, ())]


def _keys(schema: dict[str, Any], properties: dict[str, Any], above: str = "") -> list[tuple[str, list[Any]]]:
    """Return every key below `above` with its listed values, if any."""
    keys: list[tuple[str, list[Any]]] = []
    for name, node in properties.items():
        options = [_resolved(schema, option) for option in node.get("anyOf", [node])]
        section = next((option for option in options if "properties" in option), None)
        if section is not None:
            keys += _keys(schema, section["properties"], f"{above}{name}.")
        else:
            values = [value for option in options for value in option.get("enum", _booleans(option))]
            keys.append((f"{above}{name}", values))
    return keys


def _resolved(schema: dict[str, Any], node: dict[str, Any]) -> dict[str, Any]:
    """Return `node` of the JSON schema, or the definition to which it refers."""
    reference = node.get("$ref")
    resolved: dict[str, Any] = schema["$defs"][reference.rpartition("/")[2]] if reference else node
    return resolved


def _booleans(node: dict[str, Any]) -> list[Any]:
    return [True, False] if node.get("type") == "boolean" else []
