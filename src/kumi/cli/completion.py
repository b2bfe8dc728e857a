"""Completion in the shell, by argcomplete: verbs, flags, files, and the keys of run files as KEY=VALUE.

eval "$(register-python-argcomplete kumi)"        # bash, zsh; argcomplete's page has fish and others
"""

from __future__ import annotations

import argparse
import os
from typing import Any

# argcomplete sets it when the shell asks for completions.
ASKED = "_ARGCOMPLETE"


def complete(parser: argparse.ArgumentParser) -> None:
    """Answer the shell and end, where it asks; do nothing else."""
    if ASKED not in os.environ:
        return
    import argcomplete

    argcomplete.autocomplete(parser)


def overrides(prefix: str, **_: Any) -> list[str]:
    """Return the keys of run files, each with `=`; once a key is written, the values that it may have, if listed."""
    import json

    from kumi.config import json_schema

    schema = json_schema()
    key, equals, _value = prefix.partition("=")
    keys = dict(_keys(schema, schema["properties"]))
    if not equals:
        return [f"{name}=" for name in keys]
    return [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for value in keys.get(key, ())]


def _keys(schema: dict[str, Any], properties: dict[str, Any], above: str = "") -> list[tuple[str, list[Any]]]:
    """Return every key below `above` with the values it may have, empty where these are not listed."""
    found = []
    for name, node in properties.items():
        options = [_resolved(schema, option) for option in node.get("anyOf", [node])]
        section = next((option for option in options if "properties" in option), None)
        if section is not None:
            found += _keys(schema, section["properties"], f"{above}{name}.")
        else:
            values = [value for option in options for value in option.get("enum", _booleans(option))]
            found.append((f"{above}{name}", values))
    return found


def _resolved(schema: dict[str, Any], node: dict[str, Any]) -> dict[str, Any]:
    reference = node.get("$ref")
    resolved: dict[str, Any] = schema["$defs"][reference.rpartition("/")[2]] if reference else node
    return resolved


def _booleans(node: dict[str, Any]) -> list[Any]:
    return [True, False] if node.get("type") == "boolean" else []
