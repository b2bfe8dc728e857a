"""Configurations as text: YAML, JSON, shell and Python, with comments about the plan."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from typing import Any

# Most characters of a line.
_WIDTH = 100


def as_comment(lines: Iterable[str]) -> str:
    """Return `lines` as comments of a shell, YAML or Python file, wrapped at `_WIDTH` except commands ("$ ...")."""
    return "".join(f"# {part}\n" for line in lines for part in ([line] if line.startswith("$") else _wrap(line)))


def _wrap(line: str) -> list[str]:
    """Split a line at blanks into lines of at most `_WIDTH`, all but the first indented by two blanks."""
    lines, current = [], ""
    for word in line.split(" "):
        if current and len(current) + 1 + len(word) > _WIDTH:
            lines.append(current)
            current = "  " + word
        else:
            current = f"{current} {word}" if current else word
    return [*lines, current]


def to_yaml(data: Mapping[str, Any], head: Iterable[str]) -> str:
    """Return `data` as YAML in its order, below the comment `head`."""
    yaml: Any = import_module("yaml")  # imported here, so that the planner starts faster

    dumper: Any = type("Dumper", (yaml.SafeDumper,), {"ignore_aliases": lambda self, data: True})
    # YAML 1.1 reads 1e-08 as text: a number needs a dot before the exponent.
    dumper.add_representer(float, lambda self, value: self.represent_scalar("tag:yaml.org,2002:float", _number(value)))
    body: str = yaml.dump(dict(data), Dumper=dumper, sort_keys=False, default_flow_style=False, width=_WIDTH)
    return as_comment(head) + body


def _number(value: float) -> str:
    """Return `value` as YAML 1.1 reads it, with a dot if it has an exponent."""
    text = repr(value)
    return text.replace("e", ".0e") if "e" in text and "." not in text else text


def to_json(data: Mapping[str, Any]) -> str:
    """Return `data` as JSON in its order."""
    return json.dumps(data, indent=2) + "\n"


def command_line_options(options: Mapping[str, Any]) -> list[str]:
    """Return command-line options: True is a flag without value, None and False are left out, lists are spread."""
    lines: list[str] = []
    for name, value in options.items():
        if value is None or value is False:
            continue
        values = [] if value is True else value if isinstance(value, list | tuple) else [value]
        lines.append(" ".join([f"--{name}", *(shlex.quote(str(item)) for item in values)]))
    return lines


def bash_array(name: str, groups: Mapping[str, Sequence[str]]) -> str:
    """Return a bash array of the arguments in `groups` (title -> arguments), each group below its title."""
    lines = [f"{name}=("]
    for title, items in groups.items():
        if items:
            lines += [f"    # {title}", *(f"    {item}" for item in items)]
    return "\n".join([*lines, ")"]) + "\n"


def python_call(name: str, values: Mapping[str, Any], indent: int = 0) -> str:
    """Return a call of `name` with the keyword arguments `values`, one on each line."""
    pad = " " * indent
    inside = "".join(f"{pad}    {key}={_literal(value)},\n" for key, value in values.items())
    return f"{name}(\n{inside}{pad})"


class PythonCode(str):
    """A Python expression, which `python_call` writes without quotes."""

    __slots__ = ()


def _literal(value: Any) -> str:
    return str(value) if isinstance(value, PythonCode) else repr(value)
