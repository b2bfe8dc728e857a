"""`kumi data`: tokenise a run's data, inspect it, show which tokens are trained, or check sources for duplicates."""

from __future__ import annotations

from argparse import Namespace
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from kumi.cli.arguments import add_run_file, add_verb
from kumi.errors import OK, ConfigError, RefusedError

if TYPE_CHECKING:
    from kumi.config import ResolvedRun
    from kumi.data import Store

_SHOWN = 3  # examples that `show` prints by default


def add(verbs: Any) -> None:
    """Declare the verb's arguments."""
    parser = add_verb(
        verbs, "data", "Tokenise a run's data, inspect, show or check it", "kumi data show examples/chat.toml 5"
    )
    parser.add_argument(
        "action",
        choices=["prepare", "inspect", "show", "check"],
        help="tokenise now; count the tokenised data; print examples with the trained tokens marked, as many as a "
        f"number after the run file says ({_SHOWN} by default); or look for duplicates in the sources",
    )
    add_run_file(parser)
    parser.add_argument("--first", type=int, default=0, metavar="N", help="show: the number of the first example")
    parser.add_argument("--source", metavar="NAME", help="show: only this source, by the name that inspect prints")
    parser.add_argument("--validation", action="store_true", help="show: held-out examples")
    parser.add_argument(
        "--diff", action="store_true", help="show: compare with the text of the chat template over whole conversations"
    )
    parser.add_argument("--near", action="store_true", help="check: look for near duplicates, too")
    parser.add_argument(
        "--against", action="append", default=[], metavar="FILE", help="check: look for text of this file, too"
    )
    parser.add_argument("--write", metavar="FILE", help="check: list the rows in FILE, for data.exclude_rows")
    parser.set_defaults(run_verb=run)


def run(arguments: Namespace) -> int:
    """Tokenise, inspect, show or check. Return the exit code."""
    from kumi.config import load, open_run
    from kumi.data import inspect, load_tokenizer
    from kumi.data.unit_summary import summarise_units
    from kumi.report.reading_lines import describe_reading
    from kumi.train.prepare_data import check_data, open_data, prepare_data, tokenizer_folder

    numbers = [word for word in arguments.overrides if word.isdecimal()]
    if numbers and (arguments.action != "show" or len(numbers) > 1):
        raise ConfigError(f"data {arguments.action}: {numbers[-1]!r} is no KEY=VALUE; only `show` takes a number")
    overrides = [word for word in arguments.overrides if not word.isdecimal()]
    resolved = open_run(load(arguments.run, overrides))
    if arguments.action == "check":
        return _check(arguments, resolved)
    check_data(resolved)
    if arguments.action == "show":
        return _show(arguments, resolved, prepare_data(resolved), int(numbers[0]) if numbers else _SHOWN)
    store = prepare_data(resolved) if arguments.action == "prepare" else open_data(resolved)
    data = inspect(store.folder, load_tokenizer(tokenizer_folder(resolved)))
    for entry, source in zip(data["sources"], store.sources, strict=True):
        if source.kind != "text":
            seed, form = resolved.config.train.seed, resolved.config.objective.rows
            entry["examples"] = summarise_units(store, source, resolved.batch.seq_len, seed, form)
    with suppress(ConfigError, RefusedError):  # examples that no run can read yet, or that are not packed
        data["run"] = describe_reading(resolved, store)
    if arguments.json:
        arguments.write_json(data)
    else:
        from kumi.report.run_description import print_content, render_data

        print_content(render_data(data))
    return OK


def _show(arguments: Namespace, resolved: ResolvedRun, store: Store, count: int) -> int:
    """Print `count` examples of each source."""
    from kumi.data import load_tokenizer
    from kumi.data.shown import add_rows, show_units
    from kumi.report.run_description import make_console, print_content
    from kumi.report.token_view import render_units
    from kumi.train.prepare_data import stock_texts, tokenizer_folder

    side = "validation" if arguments.validation else "train"
    tokens = load_tokenizer(tokenizer_folder(resolved))
    units = show_units(store, tokens, count, first=arguments.first, source=arguments.source, side=side)
    seed, form = resolved.config.train.seed, resolved.config.objective.rows
    add_rows(units, store, resolved.batch.seq_len, seed, form)
    if arguments.diff:
        texts = stock_texts(resolved, {unit["digest"] for unit in units if "digest" in unit})
        for unit in units:
            unit["stock"] = texts.get(unit.get("digest", ""), [])
    if arguments.json:
        arguments.write_json({"units": units})
    else:
        print_content(render_units(units, colour=make_console().color_system is not None))
    return OK


def _check(arguments: Namespace, resolved: ResolvedRun) -> int:
    """Print the duplicates among the rows of the sources."""
    from kumi.data.hygiene import check_lines
    from kumi.train.prepare_data import check_rows

    result = check_rows(resolved, arguments.near, arguments.against, arguments.write)
    if arguments.json:
        arguments.write_json(result)
    else:
        print("\n".join(check_lines(result)))
    return OK
