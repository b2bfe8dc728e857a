"""What a run is going to do as data and as a table, and what its data are."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kumi.describe.placement import placement
from kumi.spec import ledger
from kumi.spec.cuts import cuts
from kumi.spec.layout import AXES
from kumi.units import format_bytes, format_count

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from kumi.config import PlanConfig, ResolvedRun
    from kumi.config.load import Overrides, RunFile
    from kumi.plan.types import Estimate
    from kumi.spec.job import Job


def console() -> Console:
    """Where tables go: as wide as the terminal, and 120 columns where there is none."""
    from rich.console import Console

    return Console(highlight=False, width=None if sys.stdout.isatty() else 120)


def show(content: RenderableType) -> None:
    """Prints `content`; into a file or a pipe without the blanks that fill its lines."""
    where = console()
    if sys.stdout.isatty():
        where.print(content)
        return
    with where.capture() as kept:
        where.print(content)
    print("\n".join(line.rstrip() for line in kept.get().splitlines()))


def described(path: RunFile, overrides: Overrides = ()) -> dict[str, Any]:
    """`describe` of the run file at `path`; of one without data and steps, which is enough for `kumi plan` only, what
    the planner would choose."""
    from kumi.config import load, load_plan, open_run

    config = load_plan(path, overrides)
    if config.data is None and config.train is None:
        return describe_plan(config)
    return describe(open_run(load(path, overrides)))


def estimated(path: str, overrides: Sequence[str] = ()) -> tuple[Job, Estimate]:
    """Return what the run file at `path` trains, and the estimate of its layout; without data and steps, too."""
    from kumi.config import load_plan, plan_input
    from kumi.config.decide import decide
    from kumi.config.stored import read_begun

    config = load_plan(path, overrides)
    asked, begun = plan_input(config), read_begun(config)
    return asked.job, decide(asked, None if begun is None else begun.plan).estimate


def describe(run: ResolvedRun) -> dict[str, Any]:
    """The model, layout, placement, batch and memory of `run`, as plain data."""
    steps, found = run.config.train.steps, _described(run.config, run.job, run.estimate)
    found["batch"] |= {"steps": steps, "tokens": steps * run.batch.tokens_per_step}
    return {**found, "out": str(run.out)}


def describe_plan(config: PlanConfig) -> dict[str, Any]:
    """The same, but for length and folder, of the fastest layout that agrees with what `config` pins.

    Raises LayoutError and FitError as `kumi.report.planning.plan` does.
    """
    from kumi.config import plan_input
    from kumi.report.planning import plan

    asked = plan_input(config)
    best = plan(asked.job, asked.pinned, top=1, front=False).best
    return _described(config, asked.job, best)


def _described(config: PlanConfig, job: Job, estimate: Estimate) -> dict[str, Any]:
    model, batch, layout, cluster = job.model, job.batch, estimate.layout, job.cluster
    fullest = max(estimate.memory, key=lambda one: one.total)
    return {
        "name": config.name,
        "model": {
            "family": model.family,
            "parameters": ledger.num_params(model),
            "trained_parameters": ledger.trained_params(model),
            "layers": model.num_hidden_layers,
            "hidden_size": model.hidden_size,
            "vocab_size": model.vocab_size,
            "init": config.model.init,
            "notes": list(model.notes),
        },
        "cluster": {
            "device": cluster.device.name,
            "devices_per_node": cluster.devices_per_node,
            "nodes": cluster.nodes,
            "memory_bytes": cluster.device.memory,
        },
        "layout": asdict(layout),
        "placement": placement(layout, cluster, experts=bool(cuts(model).experts)),
        "precision": asdict(job.precision),
        **({"numerics": _numerics(config, job)} if cluster.device.kind == "cpu" else {}),
        "batch": {
            "seq_len": batch.seq_len,
            "tokens_per_step": batch.tokens_per_step,
            "sequences": batch.sequences,
            "microbatches": batch.microbatches(layout),
            "train_flops_per_step": ledger.train_flops(model, batch.tokens_per_step, batch.seq_len),
        },
        "memory": {**asdict(fullest), "total": fullest.total},
    }


def _numerics(config: PlanConfig, job: Job) -> dict[str, Any]:
    """How the CPU computes, None where that is still to be measured; and by what was chosen, the milliseconds of every
    way that were measured on this machine."""
    from kumi.config.numerics import cached, this_processor

    numerics, measured = job.numerics, cached(this_processor(job.cluster.devices_per_node))
    own = measured is not None and config.cluster.source == "auto" and numerics == measured.numerics
    seconds = measured.seconds if measured is not None and own else {}
    return {
        "chosen": None if numerics is None else str(numerics),
        "milliseconds": {
            what: {way: round(1e3 * one, 3) for way, one in ways.items()} for what, ways in seconds.items()
        },
    }


def render(found: dict[str, Any]) -> RenderableType:
    """`describe`'s data as a table for the terminal."""
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    for label, text in _rows(found):
        table.add_row(label, text)
    return table


def _rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    model, batch, layout, memory = found["model"], found["batch"], found["layout"], found["memory"]
    cluster, precision = found["cluster"], found["precision"]
    ranks = cluster["devices_per_node"] * cluster["nodes"]
    dp = layout["dp_replicate"] * layout["dp_shard"]
    words = {"pp": f" ({layout['schedule']})", "cp": f" ({layout['context']})" if layout["context"] != "ring" else ""}
    axes = [f"{axis} {layout[axis]}{words.get(axis, '')}" for axis in (*AXES, "ep", "expert_tp") if layout[axis] > 1]
    kinds = [f"{kind} {format_bytes(size)}" for kind, size in memory.items() if kind != "total" and size]
    offload = f", {layout['offload']} offloaded" if layout["offload"] != "none" else ""
    trained = (
        ""
        if model["trained_parameters"] == model["parameters"]
        else (f" of which {format_count(model['trained_parameters'])}, in adapters, are trained")
    )
    length = [("length", f"{batch['steps']} steps, {format_count(batch['tokens'])} tokens")] if "steps" in batch else []
    return [
        ("run", f"{found['name']} -> {found['out']}" if "out" in found else f"{found['name']}, only planned"),
        (
            "model",
            f"{model['family']}, {format_count(model['parameters'])} parameters{trained}, "
            f"{model['layers']} layers of {model['hidden_size']}, vocabulary {model['vocab_size']}, "
            f"{model['init']} weights",
        ),
        *(("", note) for note in model["notes"]),
        ("machines", f"{ranks} x {cluster['device']}, {format_bytes(cluster['memory_bytes'])} each"),
        (
            "layout",
            f"{', '.join(axes) or 'one rank'}; ZeRO {layout['zero']}, microbatch {layout['microbatch']}, "
            f"recompute {layout['recompute']}{offload}",
        ),
        ("precision", f"{precision['compute']} compute, {precision['param']} weights, {precision['reduce']} reduction"),
        *([("numerics", _shown(found["numerics"]))] if "numerics" in found else []),
        (
            "step",
            f"{format_count(batch['tokens_per_step'])} tokens = {dp} data-parallel ranks x "
            f"{batch['microbatches']} microbatches x {layout['microbatch']} sequences x {batch['seq_len']}",
        ),
        *length,
        ("memory", f"{format_bytes(memory['total'])} a rank estimated: {', '.join(kinds)}"),
    ]


def _shown(numerics: dict[str, Any]) -> str:
    """How the CPU computes, and how many times as fast the fastest way was as the slowest."""
    if numerics["chosen"] is None:
        return "measured at the first start on this machine, in about a second"
    measured = []
    for what, ways in numerics["milliseconds"].items():
        fast, slow = (of(ways, key=lambda way: ways[way]) for of in (min, max))
        measured += [f"{what}: {fast} {ways[slow] / ways[fast]:.2g}x {slow}"] if fast != slow else []
    return f"{numerics['chosen']} (measured: {', '.join(measured)})" if measured else str(numerics["chosen"])


def render_data(found: dict[str, Any]) -> RenderableType:
    """What `kumi.data.inspect` found, as tables: sources, the first documents of each, the first faults."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    columns = ("source", "documents", "tokens", "held-out documents", "held-out tokens", "left out")
    table = Table(*columns, box=None, pad_edge=False)
    for source in found["sources"]:
        faults = ", ".join(f"{count} {kind}" for kind, count in source["faults"].items()) or "0"
        counts = ("train_documents", "train_tokens", "validation_documents", "validation_tokens")
        table.add_row(source["path"], *(f"{source[name]:,}" for name in counts), faults)
    parts: list[RenderableType] = [table, Text()]
    for source in found["sources"]:
        for number, document in enumerate(source["documents"]):
            head = f"{source['name']} document {number}, {document['tokens']} tokens, ids {document['first_ids']} ..."
            parts += [Text(f"{head} {document['last_ids']}", style="bold"), Text(document.get("text", "")), Text()]
    parts += [Text(f"left out: {item['file']}:{item['line']}: {item['reason']}") for item in found["first_faults"]]
    return Group(*parts)
