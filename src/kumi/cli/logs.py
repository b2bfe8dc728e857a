"""`kumi logs`: the output of a launched run."""

from __future__ import annotations

import subprocess
from argparse import Namespace
from typing import Any

from kumi.cli.arguments import add_run_file, add_verb, positive
from kumi.errors import ConfigError


def add(verbs: Any) -> None:
    """Declare the verb's arguments."""
    parser = add_verb(verbs, "logs", "Print the output of a launched run", "kumi logs run.toml --follow")
    add_run_file(parser)
    parser.add_argument("--follow", action="store_true", help="go on printing as the run writes")
    parser.add_argument("--lines", type=positive, default=50, metavar="N", help="last lines to print; default: 50")
    parser.set_defaults(run_verb=run)


def run(arguments: Namespace) -> int:
    """Print the output by the launcher's own command. Return the exit code of that command."""
    from kumi.config import load
    from kumi.launch.cluster_launchers import submitted_job

    if arguments.json and arguments.follow:
        raise ConfigError("logs: --json prints one object, and --follow never ends; use one of them")
    launcher, record = submitted_job(load(arguments.run, arguments.overrides))
    command = launcher.log_command(record, arguments.lines, follow=arguments.follow)
    if not arguments.json:
        try:
            return subprocess.run(command).returncode
        except FileNotFoundError:
            raise ConfigError(f"{command[0]} is not installed here; run this on a machine that has it") from None
    from kumi.launch.cluster_command import run_cluster_command

    lines = run_cluster_command(command).splitlines()
    arguments.write_json({"kind": record.kind, "id": record.id, "lines": lines})
    return 0
