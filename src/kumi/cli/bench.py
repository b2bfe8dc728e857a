"""`kumi bench`: measure this machine for the planner."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

from kumi.cli.arguments import add_verb, positive


def add(verbs: Any) -> None:
    """Declare the verb's arguments."""
    parser = add_verb(verbs, "bench", "Measure this machine for the planner", "kumi bench --out this-machine.toml")
    parser.add_argument("--out", metavar="FILE.toml", help="the new cluster file to write; default: print it")
    parser.add_argument(
        "--ranks", type=positive, metavar="N", help="ranks that measure at once; default: one per GPU, or 2 on a CPU"
    )
    parser.add_argument("--quick", action="store_true", help="fewer shapes and sizes, less time for each")
    parser.set_defaults(run_verb=run)


def run(arguments: Namespace) -> int:
    """Measure, and write the cluster file. Return the exit code."""
    from kumi.bench import bench

    return bench(
        out=None if arguments.out is None else Path(arguments.out),
        ranks=arguments.ranks,
        quick=arguments.quick,
        write_json=arguments.write_json if arguments.json else None,
    )
