# PYTHON_ARGCOMPLETE_OK
"""The command line. The file of a verb declares its arguments, imports its package, calls one function and prints.

main(argv)  -> the exit code of one command (see kumi.errors)
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence

from kumi import __version__
from kumi.cli import (
    bench,
    convert,
    data,
    describe,
    doctor,
    eval,
    generate,
    init,
    launch,
    logs,
    plan,
    push,
    status,
    stop,
    train,
    vocab,
)
from kumi.cli.completion import complete
from kumi.cli.json_output import json_output
from kumi.errors import INTERRUPTED, OK, ConfigError, KumiError
from kumi.launch import signals
from kumi.process_limits import let_threads_sleep
from kumi.safe_output import make_output_safe

__all__ = ["main"]

VERBS = (
    init,
    describe,
    plan,
    data,
    doctor,
    train,
    launch,
    status,
    stop,
    logs,
    generate,
    eval,
    convert,
    vocab,
    push,
    bench,
)

# Verbs that resume after an interruption.
_RESUMABLE = (data.run, train.run, eval.run)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code (see kumi.errors). Print help where no verb is given.

    A stop signal ends the command with the signal's exit code, from here on until training has its own handlers: a
    batch system may send one while PyTorch is still being imported.
    """
    with signals.exit_on_signal():
        return _main(argv)


def _main(argv: Sequence[str] | None) -> int:
    """Parse the arguments and run the verb, as `main` does."""
    if argv is None:
        make_output_safe()
    parser = _parser()
    complete(parser)
    arguments = _parsed(parser, argv)
    if arguments.run_verb is None:
        parser.print_help()
        return OK
    let_threads_sleep()  # before a verb imports torch
    with json_output(arguments.json) as arguments.write_json:
        return _run(arguments)


def _run(arguments: argparse.Namespace) -> int:
    """Run the verb and return its exit code. Print an error as one line, unless KUMI_DEBUG is set."""
    try:
        return int(arguments.run_verb(arguments))
    except KumiError as error:
        if os.environ.get("KUMI_DEBUG"):
            raise
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        resumes = "; finished work is kept, and the same command resumes from it"
        print(f"interrupted{resumes if arguments.run_verb in _RESUMABLE else ''}", file=sys.stderr)
        return INTERRUPTED
    except OSError as error:
        if os.environ.get("KUMI_DEBUG"):
            raise
        text = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        print(f"{type(error).__name__}: {text}; make it usable, or name another path", file=sys.stderr)
        return ConfigError.exit_code


def _parsed(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the arguments. Overrides may have any place; argparse alone accepts them only right after the run file."""
    arguments, rest = parser.parse_known_args(argv)
    strays = [word for word in rest if not re.match(r"[a-z_]+\.[^=]*=", word)] if "overrides" in arguments else rest
    if strays:
        parser.error(f"unrecognized arguments: {' '.join(strays)}")
    if rest:
        arguments.overrides += rest
    return arguments


def _parser() -> argparse.ArgumentParser:
    """Return the parser of all verbs."""
    parser = argparse.ArgumentParser(
        prog="kumi",
        allow_abbrev=False,
        description="Train large language models on many GPUs.",
        epilog="Start with: kumi init && kumi train run.toml",
    )
    parser.add_argument("--version", action="version", version=f"kumi {__version__}")
    parser.set_defaults(run_verb=None)
    verbs = parser.add_subparsers(metavar="VERB")
    for verb in VERBS:
        verb.add(verbs)
    return parser
