"""The reference of run files, in Markdown: `python -m kumi.config.reference > docs/run-file.md`."""

from __future__ import annotations

from typing import Any

from kumi.config.load import json_schema

HEAD = """# Run files

A run file is TOML. Every key that is not listed here is refused, with a suggestion. On the command line
`section.key=value` sets a key: `kumi train run.toml optim.lr=2e-5 data.sources.0.weight=3`. `kumi describe run.toml
--resolved` prints a run file with defaults and layout spelled out, and `kumi describe --schema` the JSON schema, with
which an editor completes and checks run files.

A file for planning alone needs [model] and [batch], and says in [cluster] what machines to plan for; `name`, [data] and
[train] may be left out.

This page is made from that schema: `python -m kumi.config.reference > docs/run-file.md`.
"""


def reference() -> str:
    """The page, made from the schema."""
    schema = json_schema()
    parts = [HEAD, "| key | | |\n|---|---|---|", _row("name", schema["properties"]["name"], ["name"])]
    for name, item in schema["properties"].items():
        section = _target(item, schema)
        if section is not None:
            parts.append(_section(f"[{name}]", section))
    parts += [_section(f"{title}", schema["$defs"][kind]) for title, kind in NESTED.items()]
    return "\n".join(parts) + "\n"


NESTED = {
    "A source, in `data.sources`": "SourceSection",
    "A tokenizer to train, as `data.tokenizer`": "TrainedTokenizer",
}


def _section(title: str, section: dict[str, Any]) -> str:
    required = section.get("required", [])
    rows = [_row(key, item, required) for key, item in section["properties"].items()]
    heading = f"\n## {title}\n\n{section.get('description', '')}\n\n| key | default | |\n|---|---|---|"
    return "\n".join([heading, *rows])


def _target(item: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any] | None:
    reference = next((one["$ref"] for one in (item, *item.get("anyOf", ())) if "$ref" in one), None)
    found: dict[str, Any] | None = None if reference is None else schema["$defs"][reference.rsplit("/", 1)[1]]
    return found


def _row(key: str, item: dict[str, Any], required: list[str]) -> str:
    default = "required" if key in required else _default(item.get("default"))
    return f"| `{key}` | {default} | {item.get('description', '')}{_choices(item)} |"


def _default(value: Any) -> str:
    if value is None:
        return "unset"
    text = str(value).lower() if isinstance(value, bool) else repr(value) if isinstance(value, str) else str(value)
    return f"`{text}`"


def _choices(item: dict[str, Any]) -> str:
    """The words a key may hold, where there is a list of them."""
    options = [item, *item.get("anyOf", []), item.get("items", {})]
    words = next((option["enum"] for option in options if "enum" in option), None)
    return "" if words is None else f" One of {', '.join(f'`{word}`' for word in words)}."


if __name__ == "__main__":
    print(reference(), end="")
