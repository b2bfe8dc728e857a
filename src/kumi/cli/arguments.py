"""Arguments that several verbs share."""

from __future__ import annotations

import argparse
import math
import re
from typing import Any

RUN_HELP = "a TOML run file, such as examples/quickstart.toml"
SET_HELP = "set a key of the run file, such as optim.lr=2e-5"


def add_verb(verbs: Any, name: str, summary: str, example: str) -> argparse.ArgumentParser:
    """Return the parser of a new verb, which has --help and --json."""
    parser: argparse.ArgumentParser = verbs.add_parser(
        name, allow_abbrev=False, help=summary, description=f"{summary}.", epilog=f"Example: {example}"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object on standard output, other output on standard error"
    )
    return parser


def add_run_file(parser: argparse.ArgumentParser, help: str = RUN_HELP, **options: Any) -> None:
    """Add the run file and its overrides."""
    parser.add_argument("run", metavar="RUN.toml", help=help, **options)
    add_overrides(parser)


def add_overrides(parser: argparse.ArgumentParser) -> None:
    """Add the overrides of run-file keys."""
    from kumi.cli.completion import complete_override

    action = parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help=SET_HELP)
    action.completer = complete_override  # type: ignore[attr-defined]


def add_checkpoint_flag(parser: argparse._ActionsContainer) -> None:
    """Add the flag that chooses a checkpoint of a run folder."""
    parser.add_argument(
        "--checkpoint",
        metavar="NAME",
        help="of a run folder: best, last or a step; default: best where the run keeps one, else last",
    )


def positive(text: str) -> int:
    """Return `text` as an integer of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1, got {text!r}")
    return int(text)


def not_negative(text: str) -> int:
    """Return `text` as an integer of at least 0."""
    if not (text.isascii() and text.isdecimal()):
        raise argparse.ArgumentTypeError(f"must be an integer of at least 0, got {text!r}")
    return int(text)


def token_count(text: str) -> float:
    """Return a positive number of tokens, written as 300B or 1e12."""
    from kumi.errors import ConfigError
    from kumi.units import parse_count

    try:
        return _above_zero(float(parse_count(text)), text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def days(text: str) -> float:
    """Return a positive number of days, written as 30 or 0.5."""
    if not re.fullmatch(r"\d+(\.\d*)?|\.\d+", text):
        raise argparse.ArgumentTypeError(f"must be a number of days, such as 30 or 0.5, got {text!r}")
    return _above_zero(float(text), text)


def _above_zero(value: float, text: str) -> float:
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be positive, got {text!r}")
    return value
