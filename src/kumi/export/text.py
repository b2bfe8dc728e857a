"""Configurations as text: YAML, JSON and shell, with what the plan says and leaves open in comments."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from typing import Any

WIDTH = 100


def comment(lines: Iterable[str]) -> str:
    """`lines` as comments of a shell, YAML or Python file, folded to `WIDTH` but for commands ("$ ...")."""
    return "".join(f"# {part}\n" for line in lines for part in ([line] if line.startswith("$") else _fold(line)))


def _fold(line: str) -> list[str]:
    found, current = [], ""
    for word in line.split(" "):
        if current and len(current) + 1 + len(word) > WIDTH:
            found.append(current)
            current = "  " + word
        else:
            current = f"{current} {word}" if current else word
    return [*found, current]


def to_yaml(data: Mapping[str, Any], head: Iterable[str]) -> str:
    """`data` as YAML in the order given, under the comment `head`."""
    yaml: Any = import_module("yaml")  # late: the planner need not wait for it

    dumper: Any = type("Dumper", (yaml.SafeDumper,), {"ignore_aliases": lambda self, data: True})
    # YAML 1.1 takes 1e-08 for text: it wants a dot before the exponent.
    dumper.add_representer(float, lambda self, value: self.represent_scalar("tag:yaml.org,2002:float", _number(value)))
    body: str = yaml.dump(dict(data), Dumper=dumper, sort_keys=False, default_flow_style=False, width=WIDTH)
    return comment(head) + body


def _number(value: float) -> str:
    text = repr(value)
    return text.replace("e", ".0e") if "e" in text and "." not in text else text


def to_json(data: Mapping[str, Any]) -> str:
    """`data` as JSON in the order given."""
    return json.dumps(data, indent=2) + "\n"


def arguments(options: Mapping[str, Any]) -> list[str]:
    """Command-line options: True is a bare flag, None and False are left out, a list is several values."""
    found: list[str] = []
    for name, value in options.items():
        if value is None or value is False:
            continue
        values = [] if value is True else value if isinstance(value, list | tuple) else [value]
        found.append(" ".join([f"--{name}", *(shlex.quote(str(item)) for item in values)]))
    return found


def bash_array(name: str, groups: Mapping[str, Sequence[str]]) -> str:
    """A bash array of the arguments in `groups`, each group under its title."""
    lines = [f"{name}=("]
    for title, items in groups.items():
        if items:
            lines += [f"    # {title}", *(f"    {item}" for item in items)]
    return "\n".join([*lines, ")"]) + "\n"


def python_call(name: str, values: Mapping[str, Any], indent: int = 0) -> str:
    """A call of `name` with keyword arguments, one on each line; a value of type `Code` is written as it is."""
    pad = " " * indent
    inside = "".join(f"{pad}    {key}={_literal(value)},\n" for key, value in values.items())
    return f"{name}(\n{inside}{pad})"


class Code(str):
    """A Python expression."""

    __slots__ = ()


def _literal(value: Any) -> str:
    return str(value) if isinstance(value, Code) else repr(value)
