"""`kumi describe`: describe a run without starting it, or a model folder for serving engines."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

from kumi.cli.arguments import add_run_file, add_verb
from kumi.errors import OK, ConfigError


def add(verbs: Any) -> None:
    """Declare the verb's arguments."""
    parser = add_verb(
        verbs,
        "describe",
        "Describe a run before it starts, or a model's folder",
        "kumi describe examples/quickstart.toml",
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
    if Path(arguments.run).is_dir() and _holds_model(Path(arguments.run)):
        return _model_folder(arguments)
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


def _holds_model(folder: Path) -> bool:
    from kumi.convert.handover.serving import is_model_folder

    return is_model_folder(folder)


def _model_folder(arguments: Namespace) -> int:
    """Describe a model folder. Return the exit code."""
    from kumi.convert.handover.serving import describe_folder, serving_lines, serving_of_folder

    if arguments.resolved or arguments.overrides:
        given = "--resolved" if arguments.resolved else arguments.overrides[0]
        raise ConfigError(f"describe: {given} is for run files, and {arguments.run} is a model's folder; remove it")
    description = describe_folder(Path(arguments.run))
    if arguments.json:
        arguments.write_json(description)
    else:
        print(f"{description['folder']}: {description['model']}")
        print(serving_lines(serving_of_folder(Path(arguments.run))))
    return OK
