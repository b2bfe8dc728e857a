"""`kumi plan`: what a run file asks of the planner, and where its answers go."""

from __future__ import annotations

import json
import os
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from threading import Timer
from typing import TYPE_CHECKING, Any

from kumi.describe import show
from kumi.errors import OK, ConfigError, RefusedError
from kumi.units import format_bytes, format_count

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kumi.config import PlanConfig
    from kumi.plan.remedies import Grow
    from kumi.plan.sizing import Size
    from kumi.plan.space import Pins
    from kumi.plan.supported import Unsupported
    from kumi.report.report import Report
    from kumi.spec.engine import Engine
    from kumi.spec.job import Job


def run(arguments: Namespace) -> int:
    """Plan what `arguments` name, and write what they ask for. Returns the exit code."""
    from kumi.config import job, load_plan
    from kumi.config.cluster import of_nodes

    _refuse_flags(arguments)
    _refuse_places(arguments)
    config = load_plan(arguments.run, arguments.overrides)
    _check_adapters(config, arguments)
    wanted, pinned = replace(job(config), engine=engine(arguments)), config.layout.model_dump(exclude_none=True)
    if arguments.tokens is not None:
        return _size(arguments, wanted, pinned, of_nodes(config.cluster))
    from kumi.report.planning import plan

    with progress("searching layouts") as told:
        report = plan(
            wanted, pinned, top=arguments.top, front=bool(arguments.html or arguments.svg or arguments.json),
            trainable=arguments.trainable, unsupported=unsupported(arguments),
            grow=of_nodes(config.cluster), progress=told,
        )  # fmt: skip
    _show(arguments, report)
    files, saved = _files(arguments, report), _saved(arguments, config, report)
    for file in chain(files, saved, _exported(arguments, config, report), _trace(arguments, report)):
        if not arguments.json:
            print(f"wrote {file}")
    return OK


def _show(arguments: Namespace, report: Report) -> None:
    """Prints the report, before anything is written: no file that cannot be written takes it away."""
    if arguments.json:
        print(json.dumps(report.as_dict(), indent=2))
        return
    from kumi.report.terminal import render

    show(render(report))


def _check_adapters(config: PlanConfig, arguments: Namespace) -> None:
    """Nothing, unless adapters are to be trained by another trainer, of whose ways with them nothing is known here."""
    other = arguments.export or (arguments.engine if arguments.engine != "kumi" else None)
    if config.lora is not None and other:
        raise ConfigError(f"plan: {other} with [lora]: adapters are planned for kumi only; leave [lora] out to plan "
                          f"what {other} takes for all weights")  # fmt: skip


def engine(arguments: Namespace) -> Engine:
    """The trainer whose traits the estimate has: the one named, or the one exported to, or kumi itself."""
    from kumi.plan.engines import ENGINES

    name = arguments.engine or (arguments.export if arguments.export in ENGINES else "kumi")
    if name not in ENGINES:
        raise ConfigError(f"plan: --engine {name} is unknown; use {', '.join(ENGINES)}")
    return ENGINES[name]


def unsupported(arguments: Namespace) -> Unsupported | None:
    """What keeps the trainer that is exported to, or as which is planned, from carrying a layout out; None where there
    is no such trainer, or where nothing is known of what it can do."""
    from kumi.plan import export

    trainer = arguments.export or arguments.engine
    if trainer is None or (not arguments.export and trainer not in export.TRAINERS):
        return None
    return lambda job, layout: export.unsupported(job, layout, trainer)


# What --tokens and --days answer is a table of sizes, not one plan.
OF_ONE_PLAN = ("export", "html", "svg", "trace", "save")


def _refuse_flags(arguments: Namespace) -> None:
    """Flags that would have no effect beside the others."""
    if (arguments.tokens is None) != (arguments.days is None):
        raise ConfigError("plan: --tokens and --days say together how many machines are needed; give both, or neither")
    if arguments.out and not arguments.export:
        raise ConfigError(f"plan: --out {arguments.out} is where --export writes; name a trainer with --export, too")
    for name in OF_ONE_PLAN if arguments.tokens is not None else ():
        if getattr(arguments, name):
            raise ConfigError(
                f"plan: --{name} is for one plan, and --tokens and --days compare several; "
                f"ask for the plan alone, with the cluster.nodes that they find"
            )


def _refuse_places(arguments: Namespace) -> None:
    """Places that cannot be written, said before anything is searched. A run file or an export that exists is never
    overwritten."""
    for name in (arguments.save, _folder(arguments) if arguments.export else None):
        if name is not None and Path(name).exists():
            raise RefusedError(f"{name} exists; name another place, or remove it")
    for flag in ("html", "trace", "save", "svg"):
        name = getattr(arguments, flag)
        if name and flag == "svg" and Path(name).is_file():
            raise RefusedError(f"plan: --svg {name} is a file; name a folder for the pictures")
        if name and flag != "svg" and Path(name).is_dir():
            raise RefusedError(f"plan: --{flag} {name} is a folder; name a file, such as {Path(name) / f'plan.{flag}'}")
    for flag in ("html", "trace", "save", "svg", "out"):
        name = getattr(arguments, flag)
        above = next((one for one in Path(name).absolute().parents if one.exists()), None) if name else None
        if above is not None and not (above.is_dir() and os.access(above, os.W_OK)):
            raise RefusedError(f"plan: --{flag} {name}: {above} is no folder that can be written; name another place")


def _folder(arguments: Namespace) -> str:
    return str(arguments.out or arguments.export)


def _files(arguments: Namespace, report: Report) -> Iterator[Path]:
    """The page and the pictures, which are made anew each time."""
    if arguments.html:
        from kumi.report.page import page

        yield _write(Path(arguments.html), page(report))
    if arguments.svg:
        from kumi.report.pictures import pictures

        for name, picture in pictures(report).items():
            yield _write(Path(arguments.svg) / f"{name}.svg", picture)


def _trace(arguments: Namespace, report: Report) -> Iterator[Path]:
    """The pipeline's timeline. Comes last, as it is only now known whether there is one."""
    if arguments.trace:
        if report.timeline is None and report.best.layout.pp == 1:
            raise ConfigError("plan: --trace shows a pipeline, and the best layout has pp=1; pin layout.pp to see one")
        if report.timeline is None:
            many = report.job.batch.microbatches(report.best.layout)
            raise ConfigError(
                f"plan: --trace shows every microbatch, and {many:,} are too many; lower tokens_per_step to see some"
            )
        from kumi.report.trace import trace

        yield _write(Path(arguments.trace), json.dumps(trace(report.timeline)))


def _saved(arguments: Namespace, config: PlanConfig, report: Report) -> Iterator[Path]:
    """The run file with the chosen layout pinned: what `kumi train` takes."""
    if arguments.save:
        from kumi.config import dump, pinned_to

        yield _write(Path(arguments.save), dump(pinned_to(config, report.best.layout)))


def _exported(arguments: Namespace, config: PlanConfig, report: Report) -> Iterator[Path]:
    if arguments.export:
        from kumi.plan.export import export

        steps = {} if config.train is None else {"steps": config.train.steps}
        for name, text in export(report.job, report.best.layout, arguments.export, **steps).items():
            yield _write(Path(_folder(arguments)) / name, text)


def _write(file: Path, text: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    return file


# Seconds that a search may take before it shows how far it is.
PATIENCE = 2.0


@contextmanager
def progress(what: str) -> Iterator[Callable[[float], None] | None]:
    """A bar on standard error that shows after `PATIENCE` and leaves nothing behind; None where nobody watches."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(what), BarColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=Console(stderr=True), transient=True)
    task, later = bar.add_task(what, total=1.0), Timer(PATIENCE, bar.start)
    later.daemon = True
    later.start()
    try:
        yield lambda done: bar.update(task, completed=done)
    finally:
        later.cancel()
        later.join()
        if bar.live.is_started:
            bar.stop()


def _size(arguments: Namespace, wanted: Job, pinned: Pins, grow: Grow) -> int:
    """How many nodes train `--tokens` tokens in `--days` days."""
    from kumi.plan.choose import trained
    from kumi.plan.sizing import sizes

    pinned = trained(wanted, pinned) if arguments.trainable else pinned
    with progress("trying numbers of nodes"):
        found = sizes(wanted, pinned, arguments.tokens, arguments.days, grow, unsupported(arguments))
    if arguments.json:
        print(json.dumps([_plain(one) for one in found], indent=2))
        return OK
    last = found[-1]
    tokens = format_count(arguments.tokens)
    machines = f"{last.nodes} nodes, {last.devices} x {wanted.cluster.device.name}"
    print(f"{tokens} tokens in {arguments.days:g} days: {machines}")
    show(_table(found))
    return OK


def _plain(one: Size) -> dict[str, Any]:
    fields = {name: getattr(one, name) for name in ("nodes", "devices", "days", "device_hours", "cost", "energy")}
    return fields | {"best": one.best.as_dict()}


def _table(found: Sequence[Size]) -> Any:
    """One row for each number of nodes that was tried."""
    from rich.table import Table

    from kumi.report.words import layout_words

    priced, powered = found[-1].cost is not None, found[-1].energy is not None
    names = ["nodes", "devices", "days", "device-hours", *["cost"] * priced, *["MWh"] * powered]
    table = Table(box=None, pad_edge=False)
    for name in (*names, "tokens/s", "MFU", "memory"):
        table.add_column(name, justify="right")
    table.add_column("layout")
    for one in found:
        money = [f"{one.cost:,.0f}"] if one.cost is not None else []
        energy = [f"{one.energy / 1000:,.1f}"] if one.energy is not None else []
        best = one.best
        figures = (format_count(best.tokens_per_second), f"{best.mfu:.1%}", format_bytes(best.peak_memory))
        counts = (f"{one.nodes}", f"{one.devices}", f"{one.days:,.1f}", f"{one.device_hours:,.0f}")
        table.add_row(*counts, *money, *energy, *figures, layout_words(best.layout))
    return table
