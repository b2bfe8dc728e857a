"""`kumi train`: train or resume a run; with --dry-run, execute a step without devices."""

from __future__ import annotations

import os
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kumi.cli.arguments import add_run_file, add_verb, not_negative, positive
from kumi.errors import OK, ConfigError, FitError


def add(verbs: Any) -> None:
    """Declare the verb's arguments."""
    parser = add_verb(
        verbs, "train", "Train; the same command again resumes", "kumi train examples/quickstart.toml train.steps=50"
    )
    add_run_file(parser)
    parser.add_argument(
        "--allow-change", action="append", default=[], metavar="KEY", help="resume although this key has a new value"
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="execute a step of one rank without devices; compare memory, FLOPs and messages with the plan",
    )
    parser.add_argument(
        "--rank", metavar="R", help="with --dry-run: the rank, or all-stages; default: a rank with the most memory"
    )
    nodes = parser.add_argument_group(
        "several nodes",
        "start this command on every node; without these options, the environment says which node it is",
    )
    nodes.add_argument("--node", type=not_negative, metavar="N", help="number of this node, from 0")
    nodes.add_argument("--nodes", type=positive, metavar="N", help="number of nodes")
    nodes.add_argument("--head", metavar="HOST:PORT", help="address of node 0, and a free port on it")
    nodes.add_argument(
        "--end-with-stdin",
        action="store_true",
        help="save and end, as at SIGHUP, when standard input closes, for starts over ssh",
    )
    parser.set_defaults(run_verb=run)


def run(arguments: Namespace) -> int:
    """Train, or execute a dry run. Return the exit code."""
    if arguments.dry_run:
        return _dry_run(arguments)
    if arguments.rank:
        raise ConfigError("train: --rank has no effect without --dry-run; add --dry-run, or remove --rank")
    return _train(arguments)


def _train(arguments: Namespace) -> int:
    """Train on this node, or as one rank of an outside launcher. Return the exit code."""
    from kumi.launch.early_failure import telling_others_of_errors
    from kumi.launch.signals import hang_up_with_stdin
    from kumi.launch.standing import Standing, find_standing

    standing = find_standing(os.environ, node=arguments.node, nodes=arguments.nodes, head=arguments.head)
    if arguments.end_with_stdin:
        hang_up_with_stdin()
    with telling_others_of_errors(standing):  # of a failing import, too
        from kumi.config import load
        from kumi.train.run_summary import train_output
        from kumi.train.start import start

        config = load(arguments.run, arguments.overrides)
    code = start(config, allow_change=tuple(arguments.allow_change), standing=standing)
    number = 0 if standing is None else standing.node if isinstance(standing, Standing) else standing.rank
    if arguments.json and number == 0:
        output = asdict(train_output(config, code))
        arguments.write_json({key: str(value) if isinstance(value, Path) else value for key, value in output.items()})
    return code


def _dry_run(arguments: Namespace) -> int:
    """Execute a step without devices and print the comparison with the plan. Return the exit code."""
    from kumi.dryrun import dry_run, select_ranks
    from kumi.report.run_description import estimate_run_file, print_content

    job, estimate = estimate_run_file(arguments.run, arguments.overrides)
    result = dry_run(job, estimate.layout, select_ranks(estimate, arguments.rank))
    if arguments.json:
        arguments.write_json(result)
    else:
        from kumi.dryrun.dryrun_tables import dry_run_tables

        print_content(dry_run_tables(result))
    return OK if all(rank["memory"]["fits"] for rank in result["ranks"]) else FitError.exit_code
