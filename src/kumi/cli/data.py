"""`kumi data`: tokenise a run's data, or inspect the tokenised data."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from kumi.cli.arguments import add_run_file, add_verb
from kumi.errors import OK


def add(verbs: Any) -> None:
    """Declare the verb's arguments."""
    parser = add_verb(
        verbs, "data", "Tokenise a run's data, or inspect it", "kumi data inspect examples/quickstart.toml"
    )
    parser.add_argument("action", choices=["prepare", "inspect"], help="tokenise now, or show the tokenised data")
    add_run_file(parser)
    parser.set_defaults(run_verb=run)


def run(arguments: Namespace) -> int:
    """Tokenise or inspect. Return the exit code."""
    from kumi.config import load, open_run
    from kumi.data import inspect, load_tokenizer
    from kumi.train.prepare_data import check_data, open_data, prepare_data, tokenizer_folder

    resolved = open_run(load(arguments.run, arguments.overrides))
    check_data(resolved)
    store = prepare_data(resolved) if arguments.action == "prepare" else open_data(resolved)
    data = inspect(store.folder, load_tokenizer(tokenizer_folder(resolved)))
    if arguments.json:
        arguments.write_json(data)
    else:
        from kumi.report.run_description import print_content, render_data

        print_content(render_data(data))
    return OK
