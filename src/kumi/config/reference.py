"""Generate docs/run-file.md: `python -m kumi.config.reference > docs/run-file.md`."""

from __future__ import annotations

from typing import Any

from kumi.config.load import json_schema

_HEAD = """# Run files

A run file is TOML. An unknown key is refused, with a suggestion. On the command line `section.key=value` sets a key:
`kumi train run.toml optim.lr=2e-5 data.sources.0.weight=3`. `kumi describe run.toml --resolved` prints a run file with
all defaults and the layout, and `kumi describe --schema` prints the JSON schema, with which an editor completes and
checks run files.

A file for planning needs only [model] and [batch], and describes the machines in [cluster]; `name`, [data] and [train]
are optional.

This page is generated from that schema: `python -m kumi.config.reference > docs/run-file.md`.
"""


def run_file_page() -> str:
    """Return the page in Markdown, generated from the JSON schema of run files."""
    schema = json_schema()
    parts = [_HEAD, "| key | | |\n|---|---|---|", _row("name", schema["properties"]["name"], ["name"])]
    for name, item in schema["properties"].items():
        section = _target(item, schema)
        if section is not None:
            parts.append(_section(f"[{name}]", section))
    parts += [_section(f"{title}", schema["$defs"][kind]) for title, kind in _NESTED.items()]
    return "\n".join(parts) + "\n"


# Title of a further table -> the class of the sections whose keys it lists.
_NESTED = {
    "A source, in `data.sources`": "SourceSection",
    "A tokenizer to train, as `data.tokenizer`": "TrainedTokenizer",
    "[data.chat]": "ChatSection",
    "A task, in `eval.tasks`": "TaskSection",
    "A reward, in `rewards`": "RewardSection",
    "[launch.slurm]": "SlurmSection",
    "[launch.kubernetes]": "KubernetesSection",
    "[launch.skypilot]": "SkypilotSection",
    "[launch.ssh]": "SshSection",
}


def _section(title: str, section: dict[str, Any]) -> str:
    """Return the heading, the description and the table of keys of a `section` of the JSON schema."""
    required = section.get("required", [])
    rows = [_row(key, item, required) for key, item in section["properties"].items() if not _has_own_table(item)]
    heading = f"\n## {title}\n\n{section.get('description', '')}\n\n| key | default | |\n|---|---|---|"
    return "\n".join([heading, *rows])


def _has_own_table(item: dict[str, Any]) -> bool:
    """Return True for a section inside a section, whose keys `_NESTED` lists in a table of their own."""
    return item.get("$ref", "").rsplit("/", 1)[-1] in _NESTED.values()


def _target(item: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any] | None:
    """Return the definition that `item` refers to, or None."""
    reference = next((option["$ref"] for option in (item, *item.get("anyOf", ())) if "$ref" in option), None)
    target: dict[str, Any] | None = None if reference is None else schema["$defs"][reference.rsplit("/", 1)[1]]
    return target


def _row(key: str, item: dict[str, Any], required: list[str]) -> str:
    default = "required" if key in required else _default(item.get("default"))
    return f"| `{key}` | {default} | {item.get('description', '')}{_choices(item)} |"


def _default(value: Any) -> str:
    """Return the cell of a key's default value."""
    if value is None:
        return "unset"
    text = str(value).lower() if isinstance(value, bool) else repr(value) if isinstance(value, str) else str(value)
    return f"`{text}`"


def _choices(item: dict[str, Any]) -> str:
    """Return the values of a key, if they are listed."""
    options = [item, *item.get("anyOf", []), item.get("items", {})]
    words = next((option["enum"] for option in options if "enum" in option), None)
    return "" if words is None else f" One of {', '.join(f'`{word}`' for word in words)}."


if __name__ == "__main__":
    print(run_file_page(), end="")
