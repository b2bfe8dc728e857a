"""`kumi plan`: choose the layout of a run file, or of a model and machines."""

from __future__ import annotations

import shlex
from argparse import Namespace
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kumi.cli.arguments import RUN_HELP, add_overrides, add_verb, days, positive, token_count
from kumi.cli.plan_inference import add_inference_arguments, plan_inference, refuse_inference_flags
from kumi.errors import OK, ConfigError

if TYPE_CHECKING:
    from kumi.config import PlanConfig
    from kumi.plan.report import Report
    from kumi.plan.search.diagnose import UnsupportedFn
    from kumi.spec.engine import Engine


def add(verbs: Any) -> None:
    """Declare the verb's arguments."""
    parser = add_verb(
        verbs,
        "plan",
        "Choose the layout: what fits, how fast it is, and why",
        "kumi plan examples/models/llama-3-8b --gpus 16xh100-sxm --tokens 300B",
    )
    parser.add_argument(
        "run",
        metavar="RUN.toml|MODEL",
        nargs="?",
        help=f"{RUN_HELP}, where [data] and [train] are optional; or, with --gpus, a model: a folder with "
        f"config.json, or a hub id; --calibrate needs none",
    )
    add_overrides(parser)
    parser.add_argument(
        "--gpus",
        metavar="NxNAME",
        help="the machines, such as 16xh100-sxm, or a number and a cluster file; replaces [cluster]",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--brief", action="store_true", help="print the answer in about twelve lines; the default")
    form.add_argument("--explain", action="store_true", help="print all that explains the choice")
    parser.add_argument("--trainable", action="store_true", help="only layouts that this version of kumi trains itself")
    parser.add_argument("--top", type=positive, default=6, metavar="N", help="runners-up to show; default 6")
    parser.add_argument("--html", metavar="FILE", help="write a page with pictures")
    parser.add_argument("--svg", metavar="FOLDER", help="write the pictures")
    parser.add_argument(
        "--trace", metavar="FILE", help="write the pipeline's timeline for Perfetto or chrome://tracing"
    )
    parser.add_argument("--save", metavar="FILE.toml", help="write the run file with the chosen layout pinned")
    parser.add_argument(
        "--engine", metavar="TRAINER", help="estimate for this trainer, with layouts that it supports; default: kumi"
    )
    parser.add_argument("--export", metavar="TRAINER", help="write another trainer's configuration, into --out")
    parser.add_argument("--out", metavar="FOLDER", help="where --export writes; default: the trainer's name")
    parser.add_argument(
        "--tokens", type=token_count, metavar="N", help="report time and cost of training on N tokens, such as 300B"
    )
    parser.add_argument(
        "--days", type=days, metavar="D", help="with --tokens: find the nodes that train them in D days"
    )
    parser.add_argument(
        "--calibrate",
        action="append",
        metavar="RUN_FOLDER",
        help="refit the cluster of RUN.toml, or of the run itself, to a finished run; writes a cluster file, to --out "
        "or RUN_FOLDER/calibrated.toml",
    )
    add_inference_arguments(parser)
    parser.set_defaults(run_verb=run)


def run(arguments: Namespace) -> int:
    """Plan, and write the requested files. Return the exit code."""
    refuse_inference_flags(arguments)
    if arguments.calibrate:
        from kumi.bench import refit

        write_json = arguments.write_json if arguments.json else None
        return refit.run(arguments.calibrate, arguments.run, arguments.overrides, arguments.out, write_json)
    from kumi.cli.plan_files import check_output_paths

    if arguments.run is None:
        raise ConfigError("plan: no run file and no model is given; name RUN.toml, or a model with --gpus")
    if arguments.inference:
        return plan_inference(arguments)
    _refuse_flags(arguments)
    check_output_paths(arguments)
    return _plan(arguments)


def _plan(arguments: Namespace) -> int:
    """Plan training, print the report and write the requested files. Return the exit code."""
    from kumi.cli.plan_files import write_files
    from kumi.cli.plan_sizes import print_sizes
    from kumi.config import plan_input
    from kumi.config.model_plan import load_plan_or_model
    from kumi.plan.session import plan
    from kumi.progress import show_progress

    config, defaults = load_plan_or_model(arguments.run, arguments.gpus, arguments.overrides)
    _check_adapters(config, arguments)
    asked, unsupported = plan_input(config), _unsupported(arguments)
    job = replace(asked.job, engine=_engine(arguments, asked.job.engine))
    for key, value in defaults.items():
        print(f"{key}={value:_} by default; set it with {key}=VALUE")
    if arguments.days is not None:
        return print_sizes(arguments, job, asked.pinned, unsupported)
    with show_progress("searching layouts", 1.0, "{:.0%}".format, enabled=not arguments.json) as update:
        report = plan(
            job,
            asked.pinned,
            top=arguments.top,
            front=bool(arguments.html or arguments.svg or arguments.json),
            trainable=arguments.trainable,
            unsupported=unsupported,
            tokens=arguments.tokens,
            other_nodes=True,
            progress=update,
        )
    _show(arguments, config, report, defaults)
    for file in write_files(arguments, config, report):
        print(f"wrote {file}")
    return OK


def _show(arguments: Namespace, config: PlanConfig, report: Report, defaults: dict[str, int]) -> None:
    """Print the report before files are written, so that a failing write does not lose it."""
    if arguments.json:
        from kumi.report.rollout_lines import rollout_data

        rollout = rollout_data(report.job, report.best)
        rollouts = {} if rollout is None else {"rollout": rollout}
        arguments.write_json(report.as_dict() | {"defaults": defaults} | rollouts)
        return
    from kumi.report.run_description import print_content
    from kumi.report.terminal import render_brief, render_report

    if arguments.explain:
        print_content(render_report(report))
    else:
        print_content(render_brief(report, _command(arguments, config, report.job.cluster.nodes)))


def _command(arguments: Namespace, config: PlanConfig, nodes: int) -> str:
    """Return the commands that pin this plan in a run file and train with it on `nodes` nodes."""
    file = arguments.save or "planned.toml"
    gpus = [] if arguments.gpus is None else ["--gpus", arguments.gpus]
    trainable = ["--trainable"] if arguments.trainable else []
    words = ["kumi", "plan", arguments.run, *arguments.overrides, *gpus, *trainable]
    steps = [] if arguments.save else [shlex.join([*words, "--save", file])]
    missing = [f"[{name}]" for name in ("data", "train") if getattr(config, name) is None]
    steps += [f"add {' and '.join(missing)} to it"] if missing else []
    return ", ".join([*steps, f"kumi train {file}{' once on every node (kumi launch does this)' if nodes > 1 else ''}"])


def _check_adapters(config: PlanConfig, arguments: Namespace) -> None:
    """Raise ConfigError for adapters with another trainer, whose training of adapters is not modelled."""
    other = arguments.export or (arguments.engine if arguments.engine != "kumi" else None)
    if config.lora is not None and other:
        raise ConfigError(
            f"plan: {other} with [lora]: adapters can be planned for kumi only; remove [lora] to plan full training "
            f"with {other}"
        )


def _engine(arguments: Namespace, own: Engine) -> Engine:
    """Return the trainer whose traits the estimate has: --engine, else --export, else kumi, with the traits `own`."""
    from kumi.plan.engines import ENGINES

    name = arguments.engine or (arguments.export if arguments.export in ENGINES else "kumi")
    if name not in ENGINES:
        raise ConfigError(f"plan: --engine {name} is unknown; use {', '.join(ENGINES)}")
    return own if name == "kumi" else ENGINES[name]


def _unsupported(arguments: Namespace) -> UnsupportedFn | None:
    """Return the check whether the named trainer supports a layout; None if no trainer is named or modelled."""
    from kumi import export

    trainer = arguments.export or arguments.engine
    if trainer is None or (not arguments.export and trainer not in export.TRAINERS):
        return None
    return lambda job, layout: export.unsupported(job, layout, trainer)


# Flags that need one plan: --tokens with --days gives a table of cluster sizes instead.
_SINGLE_PLAN_FLAGS = ("export", "html", "svg", "trace", "save")


def _refuse_flags(arguments: Namespace) -> None:
    """Raise ConfigError for flags that have no effect in this combination."""
    if arguments.days is not None and arguments.tokens is None:
        raise ConfigError("plan: --days has no effect without --tokens; add --tokens N, or remove --days")
    if arguments.out and not arguments.export:
        raise ConfigError(f"plan: --out {arguments.out} has no effect without --export; name a trainer with --export")
    for name in _SINGLE_PLAN_FLAGS if arguments.days is not None else ():
        if getattr(arguments, name):
            raise ConfigError(
                f"plan: --{name} needs one plan, but --tokens with --days compares several; remove --days, and set "
                f"cluster.nodes to the number that they find"
            )
