"""`kumi train`: train or resume a run; with --dry-run, execute a step without devices."""

from __future__ import annotations

import os
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kumi.cli.arguments import add_run_file, add_verb
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
    parser.set_defaults(run_verb=run)


def run(arguments: Namespace) -> int:
    """Train, or execute a dry run. Return the exit code."""
    if arguments.dry_run:
        return _dry_run(arguments)
    if arguments.rank:
        raise ConfigError("train: --rank has no effect without --dry-run; add --dry-run, or remove --rank")
    from kumi.launch import signals

    with signals.exit_on_signal():
        return _train(arguments)


def _train(arguments: Namespace) -> int:
    from kumi.config import load
    from kumi.train.run_summary import train_output
    from kumi.train.start import start

    config = load(arguments.run, arguments.overrides)
    code = start(config, allow_change=tuple(arguments.allow_change))
    if arguments.json and os.environ.get("RANK", "0") == "0":
        output = asdict(train_output(config, code))
        arguments.write_json({key: str(value) if isinstance(value, Path) else value for key, value in output.items()})
    return code


def _dry_run(arguments: Namespace) -> int:
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
