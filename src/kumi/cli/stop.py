"""`kumi stop`: let a launched run save and stop, or end it at once."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from kumi.cli.arguments import add_run_file, add_verb
from kumi.errors import OK


def add(verbs: Any) -> None:
    """Declare the verb's arguments."""
    parser = add_verb(
        verbs, "stop", "Let a launched run save and stop; kumi launch continues it", "kumi stop run.toml --now"
    )
    add_run_file(parser)
    parser.add_argument("--now", action="store_true", help="end the job at once; only the last checkpoint stays")
    parser.set_defaults(run_verb=run)


def run(arguments: Namespace) -> int:
    """Stop the job. Return the exit code."""
    from kumi.config import load
    from kumi.config.stored_config import run_folder
    from kumi.launch.cluster_launchers import request_stop, submitted_job

    config = load(arguments.run, arguments.overrides)
    launcher, record = submitted_job(config)
    out = run_folder(config)
    assert out is not None, "a configuration that `load` returns has [train]"
    sentence = launcher.stop(record, out, now=arguments.now)
    if launcher.shares_files and not arguments.now:
        request_stop(out)
    if arguments.json:
        arguments.write_json({"kind": record.kind, "id": record.id, "message": sentence})
    print(sentence)
    return OK
