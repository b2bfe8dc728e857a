"""The command line: each verb parses, imports its package, calls one function and prints."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from kumi import __version__
from kumi.errors import INTERRUPTED, OK, ConfigError, FitError, KumiError
from kumi.output import keep_output
from kumi.verbs import add_push, add_vocab, push_flags, pushed

if TYPE_CHECKING:
    from kumi.config import Run

RUN_HELP = "a TOML run file, such as examples/quickstart.toml"
SET_HELP = "set a key of the run file, such as optim.lr=2e-5"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; the exit code (see kumi.errors)."""
    if argv is None:
        keep_output()
    arguments = _parsed(argv)
    try:
        return int(arguments.verb(arguments))
    except KumiError as error:
        if os.environ.get("KUMI_DEBUG"):
            raise
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        goes_on = "; what was finished is kept, and the same command goes on from there"
        print(f"interrupted{goes_on if arguments.verb in (_data, _train) else ''}", file=sys.stderr)
        return INTERRUPTED
    except OSError as error:
        if os.environ.get("KUMI_DEBUG"):
            raise
        what = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        print(f"{type(error).__name__}: {what}; make it usable, or name another place, and run again", file=sys.stderr)
        return ConfigError.exit_code


def _parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments. Overrides may stand anywhere: argparse by itself takes those that directly follow the run file."""
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    strays = [word for word in rest if not re.match(r"[a-z_]+\.[^=]*=", word)] if "overrides" in arguments else rest
    if strays:
        parser.error(f"unrecognized arguments: {' '.join(strays)}")
    if rest:
        arguments.overrides += rest
    return arguments


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kumi", allow_abbrev=False, description="Train large language models on many GPUs.",
        epilog="Start with: kumi train examples/quickstart.toml",
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=f"kumi {__version__}")
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    _describe_parser(verbs)
    _plan_parser(verbs)
    _data_parser(verbs)
    _train_parser(verbs)
    _convert_parser(verbs)
    add_vocab(partial(_verb, verbs), _positive)
    add_push(partial(_verb, verbs))
    _bench_parser(verbs)
    return parser


def _verb(verbs: Any, name: str, summary: str, example: str) -> argparse.ArgumentParser:
    found: argparse.ArgumentParser = verbs.add_parser(
        name, allow_abbrev=False, help=summary, description=f"{summary}.", epilog=f"Example: {example}"
    )
    return found


def _describe_parser(verbs: Any) -> None:
    parser = _verb(
        verbs, "describe", "Say what a run is going to do", "kumi describe examples/quickstart.toml layout.zero=3"
    )
    parser.add_argument("run", nargs="?", metavar="RUN.toml", help=RUN_HELP)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help=SET_HELP)
    parser.add_argument("--schema", action="store_true", help="print the JSON schema of run files, for editors")
    parser.add_argument(
        "--resolved", action="store_true", help="print the whole configuration, defaults included, as TOML"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(verb=_describe)


def _plan_parser(verbs: Any) -> None:
    parser = _verb(
        verbs, "plan", "Choose the layout: what fits, how fast it is, and why",
        "kumi plan examples/plan/llama-3-8b.toml cluster.nodes=4 --html plan.html",
    )  # fmt: skip
    parser.add_argument("run", metavar="RUN.toml", help=f"{RUN_HELP}; [data] and [train] may be missing")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help=SET_HELP)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--trainable", action="store_true", help="only layouts that this version of kumi trains itself")
    parser.add_argument("--top", type=_positive, default=6, metavar="N", help="runners-up to show; default 6")
    parser.add_argument("--html", metavar="FILE", help="write a page with pictures")
    parser.add_argument("--svg", metavar="FOLDER", help="write the pictures")
    parser.add_argument(
        "--trace", metavar="FILE", help="write the pipeline's timeline for Perfetto or chrome://tracing"
    )
    parser.add_argument("--save", metavar="FILE.toml", help="write the run file with the chosen layout pinned")
    parser.add_argument(
        "--engine", metavar="TRAINER", help="as this trainer carries it out, where it can; default: kumi itself"
    )
    parser.add_argument("--export", metavar="TRAINER", help="write another trainer's configuration, into --out")
    parser.add_argument("--out", metavar="FOLDER", help="where --export writes; default: the trainer's name")
    parser.add_argument("--tokens", type=_tokens, metavar="N", help="with --days: how many machines N tokens need")
    parser.add_argument("--days", type=_days, metavar="D", help="with --tokens: in how many days")
    parser.add_argument(
        "--calibrate", action="append", metavar="RUN_FOLDER", help="refit the cluster to a finished run, into --out"
    )
    parser.set_defaults(verb=_plan)


def _tokens(text: str) -> float:
    from kumi.units import parse_count

    try:
        return _more_than_none(float(parse_count(text)), text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _days(text: str) -> float:
    if not re.fullmatch(r"\d+(\.\d*)?|\.\d+", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of days; write it as 30 or 0.5")
    return _more_than_none(float(text), text)


def _more_than_none(value: float, text: str) -> float:
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is nothing to plan for; give more than 0")
    return value


def _data_parser(verbs: Any) -> None:
    parser = _verb(verbs, "data", "Tokenise a run's data, or look at it", "kumi data inspect examples/quickstart.toml")
    parser.add_argument("action", choices=["prepare", "inspect"], help="tokenise now, or show what was tokenised")
    parser.add_argument("run", metavar="RUN.toml", help=RUN_HELP)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help=SET_HELP)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(verb=_data)


def _train_parser(verbs: Any) -> None:
    parser = _verb(
        verbs, "train", "Train; the same command again resumes", "kumi train examples/quickstart.toml train.steps=50"
    )
    parser.add_argument("run", metavar="RUN.toml", help=RUN_HELP)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help=SET_HELP)
    parser.add_argument(
        "--allow-change", action="append", default=[], metavar="KEY", help="resume although this key has a new value"
    )
    parser.add_argument(
        "--dry-run", action="store_true",
        help="carry out a step of one rank without devices: memory, FLOPs and messages beside the planner's",
    )  # fmt: skip
    parser.add_argument(
        "--rank", metavar="R", help="with --dry-run: which rank, or all-stages; default: one of the fullest"
    )
    parser.add_argument("--json", action="store_true", help="with --dry-run: print JSON")
    parser.set_defaults(verb=_train)


def _convert_parser(verbs: Any) -> None:
    parser = _verb(
        verbs,
        "convert",
        "Convert weights, streaming",
        "kumi convert runs/quickstart/checkpoints/step_000400 out --to hf",
    )
    parser.add_argument("source", metavar="SRC", help="a folder of Hugging Face, kumi or Megatron, or a hub id")
    parser.add_argument("target", metavar="DST", help="the folder to write; it must not exist")
    parser.add_argument("--to", choices=["hf", "kumi", "megatron"], required=True, help="the format to write")
    parser.add_argument("--config", metavar="FILE", help="the config.json of a Megatron checkpoint that has none")
    parser.add_argument("--base", metavar="FOLDER", help="the model of adapters that are to be merged, if elsewhere")
    parser.add_argument("--megatron-local", action="store_true", help="for Megatron-Core without TransformerEngine")
    parser.add_argument(
        "--megatron-vocab", type=_positive, default=1, metavar="N", help="pad Megatron's vocabulary to a multiple of N"
    )
    parser.add_argument("--verify", action="store_true", help="load the result and compare tensors and logits")
    parser.add_argument("--dtype", metavar="NAME", help="write weights as float32, bfloat16 or float16; default: as is")
    parser.add_argument(
        "--layout", metavar="TEXT", help="with --to kumi: cut as these ranks hold them, as in tp=2,pp=2"
    )
    parser.add_argument("--push", metavar="ORG/NAME", help="with --to hf: verify, and send the folder to the hub")
    push_flags(parser)
    parser.set_defaults(verb=_convert)


def _bench_parser(verbs: Any) -> None:
    parser = _verb(verbs, "bench", "Measure this machine for the planner", "kumi bench --out this-machine.toml")
    parser.add_argument("--out", metavar="FILE.toml", help="the new cluster file to write; printed where left out")
    parser.add_argument(
        "--ranks", type=_positive, metavar="N", help="ranks that work at once; default: the GPUs, or 2 on a CPU"
    )
    parser.add_argument("--quick", action="store_true", help="fewer shapes and sizes, less time for each")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(verb=_bench)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1; give 1 or more")
    return int(text)


def _resolve(arguments: argparse.Namespace) -> Run:
    from kumi.config import load, resolve

    return resolve(load(arguments.run, arguments.overrides))


def _describe(arguments: argparse.Namespace) -> int:
    from kumi import config
    from kumi.describe import described, render, render_placement, show

    if arguments.schema:
        print(json.dumps(config.json_schema(), indent=2))
        return OK
    if arguments.run is None:
        raise ConfigError("describe: name a run file, such as examples/quickstart.toml, or give --schema")
    if arguments.resolved:
        print(config.dump(_resolve(arguments).config), end="")
        return OK
    found = described(arguments.run, arguments.overrides)
    if arguments.json:
        print(json.dumps(found, indent=2))
    else:
        show(render(found))
        show(render_placement(found["placement"]))
    return OK


def _plan(arguments: argparse.Namespace) -> int:
    if arguments.calibrate:
        from kumi.bench import refit

        return refit.run(arguments.calibrate, arguments.run, arguments.overrides, arguments.out, as_json=arguments.json)
    from kumi import planning

    return planning.run(arguments)


def _data(arguments: argparse.Namespace) -> int:
    from kumi.data import inspect, load_tokenizer
    from kumi.train.prepare import check_data, open_data, prepare_data, tokenizer_folder

    run = _resolve(arguments)
    check_data(run)
    store = prepare_data(run) if arguments.action == "prepare" else open_data(run)
    found = inspect(store.folder, load_tokenizer(tokenizer_folder(run)))
    if arguments.json:
        print(json.dumps(found, indent=2))
    else:
        from kumi.describe import render_data, show

        show(render_data(found))
    return OK


def _train(arguments: argparse.Namespace) -> int:
    if arguments.dry_run:
        return _dry_run(arguments)
    for name in ("rank", "json"):
        if getattr(arguments, name):
            raise ConfigError(f"train: --{name} is for --dry-run; add that, or leave --{name} out")
    from kumi.train.start import start

    return start(_resolve(arguments), allow_change=tuple(arguments.allow_change))


def _dry_run(arguments: argparse.Namespace) -> int:
    from kumi.describe import estimated, show
    from kumi.dryrun import chosen_ranks, dry_run

    job, estimate = estimated(arguments.run, arguments.overrides)
    found = dry_run(job, estimate.layout, chosen_ranks(estimate, arguments.rank))
    if arguments.json:
        print(json.dumps(found, indent=2))
    else:
        from kumi.dryrun.show import render

        show(render(found))
    return OK if all(rank["memory"]["fits"] for rank in found["ranks"]) else FitError.exit_code


def _megatron(arguments: argparse.Namespace) -> Any:
    """How the Megatron that loads what is written is set up; None where nothing is said of it."""
    if not arguments.megatron_local and arguments.megatron_vocab == 1:
        return None
    from kumi.convert.megatron_write import Options

    return Options(arguments.megatron_local, arguments.megatron_vocab)


def _convert(arguments: argparse.Namespace) -> int:
    if arguments.push is None and (arguments.public or arguments.unverified):
        raise ConfigError("convert: --public and --unverified are for --push; add that, or leave them out")
    if arguments.push is not None:
        if arguments.to != "hf":
            raise ConfigError(f"convert: --push sends Hugging Face folders, not --to {arguments.to}; use --to hf")
        from kumi.hub import check_push

        check_push(arguments.push, "--push")
    from kumi.convert import convert

    verify = arguments.verify or (arguments.push is not None and not arguments.unverified)
    print(convert(arguments.source, arguments.target, to=arguments.to, verify=verify, dtype=arguments.dtype,
                  layout=arguments.layout, config=arguments.config, megatron=_megatron(arguments),
                  base=arguments.base))  # fmt: skip
    return OK if arguments.push is None else pushed(arguments.target, arguments.push, arguments)


def _bench(arguments: argparse.Namespace) -> int:
    from pathlib import Path

    from kumi.bench import bench

    out = None if arguments.out is None else Path(arguments.out)
    return bench(out=out, ranks=arguments.ranks, quick=arguments.quick, as_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())
