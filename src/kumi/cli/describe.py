"""`kumi describe`: what a run is going to do."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from kumi.cli.arguments import add_run_file, add_verb
from kumi.errors import OK, ConfigError


def add(verbs: Any) -> None:
    """Declare the verb's arguments."""
    parser = add_verb(
        verbs, "describe", "Say what a run is going to do", "kumi describe examples/quickstart.toml layout.zero=3"
    )
    add_run_file(parser, nargs="?")
    parser.add_argument("--schema", action="store_true", help="print the JSON schema of run files, for editors")
    parser.add_argument(
        "--resolved", action="store_true", help="print the whole configuration, defaults included, as TOML"
    )
    parser.set_defaults(run_verb=run)


def run(arguments: Namespace) -> int:
    """Describe the run, or print the schema or the resolved configuration. Returns the exit code."""
    from kumi import config
    from kumi.report.rank_placement import render_placement
    from kumi.report.run_description import described, render, show

    if arguments.schema:
        arguments.write_json(config.json_schema())
        return OK
    if arguments.run is None:
        raise ConfigError("describe: name a run file, such as examples/quickstart.toml, or give --schema")
    if arguments.resolved:
        resolved = config.open_run(config.load(arguments.run, arguments.overrides)).config
        if arguments.json:
            arguments.write_json(resolved.model_dump(mode="json", exclude_none=True))
        else:
            print(config.dump(resolved), end="")
        return OK
    description = described(arguments.run, arguments.overrides)
    if arguments.json:
        arguments.write_json(description)
    else:
        show(render(description))
        show(render_placement(description["placement"]))
    return OK
