"""`kumi describe`: describe a run without starting it."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from kumi.cli.arguments import add_run_file, add_verb
from kumi.errors import OK, ConfigError


def add(verbs: Any) -> None:
    """Declare the verb's arguments."""
    parser = add_verb(
        verbs, "describe", "Describe a run before it starts", "kumi describe examples/quickstart.toml layout.zero=3"
    )
    add_run_file(parser, nargs="?")
    parser.add_argument("--schema", action="store_true", help="print the JSON schema of run files, for editors")
    parser.add_argument(
        "--resolved", action="store_true", help="print the configuration with all defaults and the layout, as TOML"
    )
    parser.set_defaults(run_verb=run)


def run(arguments: Namespace) -> int:
    """Describe the run, or print the schema or the resolved configuration. Return the exit code."""
    from kumi import config
    from kumi.report.rank_placement import render_placement
    from kumi.report.run_description import describe_run_file, print_content, render_description

    if arguments.schema:
        arguments.write_json(config.json_schema())
        return OK
    if arguments.run is None:
        raise ConfigError("describe: no run file is given; name one, such as examples/quickstart.toml, or use --schema")
    if arguments.resolved:
        resolved = config.open_run(config.load(arguments.run, arguments.overrides)).config
        if arguments.json:
            arguments.write_json(resolved.model_dump(mode="json", exclude_none=True))
        else:
            print(config.dump(resolved), end="")
        return OK
    description = describe_run_file(arguments.run, arguments.overrides)
    if arguments.json:
        arguments.write_json(description)
    else:
        print_content(render_description(description))
        print_content(render_placement(description["placement"]))
    return OK
