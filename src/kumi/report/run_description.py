"""The description of a run as plain data and as a table, and a table of its data sources."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kumi.report.rank_placement import placement
from kumi.report.reading_lines import reading_lines
from kumi.report.rollout_lines import length_line, memory_line, rollout_data, time_line
from kumi.report.unit_lines import unit_lines
from kumi.spec import ledger
from kumi.spec.divisibility import divisibility
from kumi.spec.layout import AXES, Layout
from kumi.spec.lora import NF4_BLOCK_BYTES, nf4_blocks
from kumi.spec.loss_passes import keeps_chunk
from kumi.spec.numerics import kernels_text
from kumi.spec.schedule import is_pipelined
from kumi.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from kumi.config import PlanConfig, ResolvedRun
    from kumi.config.load import Overrides, RunFile
    from kumi.plan.estimates import Estimate
    from kumi.spec.job import Job
    from kumi.spec.model import ModelSpec

# From this multiple of the usual learning rate on, a description warns.
_HIGH_RATE = 10


def make_console() -> Console:
    """Return a console as wide as the terminal, or 120 columns wide without one."""
    from rich.console import Console

    return Console(highlight=False, width=None if sys.stdout.isatty() else 120)


def print_content(content: RenderableType) -> None:
    """Print `content`; strip trailing blanks if stdout is a file or a pipe."""
    output = make_console()
    if sys.stdout.isatty():
        output.print(content)
        return
    with output.capture() as captured:
        output.print(content)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))


def describe_run_file(path: RunFile, overrides: Overrides = ()) -> dict[str, Any]:
    """Describe the run file at `path`, with the planner's choice of layout if it has no [data] and no [train]."""
    from kumi.config import RunConfig, load_run_or_plan, open_run

    config = load_run_or_plan(path, overrides)
    return describe_resolved(open_run(config)) if isinstance(config, RunConfig) else describe_plan(config)


def estimate_run_file(path: str, overrides: Sequence[str] = ()) -> tuple[Job, Estimate]:
    """Return the job of the run file at `path`, and the estimate of its layout. [data] and [train] are optional."""
    from kumi.config import load_plan, plan_input
    from kumi.config.decide_layout import decide_layout
    from kumi.config.stored_config import read_stored_run

    config = load_plan(path, overrides)
    inputs, stored = plan_input(config), read_stored_run(config)
    return inputs.job, decide_layout(inputs, None if stored is None else stored.plan).estimate


def describe_resolved(run: ResolvedRun) -> dict[str, Any]:
    """Return the model, layout, placement, batch, memory and output folder of `run` as plain data."""
    steps, description = run.planned_steps, _described(run.config, run.job, run.estimate)
    description["batch"] |= {
        "steps": steps,
        "epochs": run.config.train.epochs,
        "tokens": None if steps is None else steps * run.batch.tokens_per_step,
    }
    return {**description, "out": str(run.out)}


def describe_plan(config: PlanConfig) -> dict[str, Any]:
    """Describe the fastest layout that agrees with the fields pinned in `config`, without steps and output folder.

    Raise LayoutError and FitError as `kumi.plan.session.plan` does.
    """
    from kumi.config import plan_input
    from kumi.plan.session import plan

    inputs = plan_input(config)
    best = plan(inputs.job, inputs.pinned, top=1, front=False).best
    return _described(config, inputs.job, best)


def _described(config: PlanConfig, job: Job, estimate: Estimate) -> dict[str, Any]:
    """Return the description of `job` with the layout of `estimate`, without steps and output folder."""
    model, batch, layout, cluster = job.model, job.batch, estimate.layout, job.cluster
    fullest = max(estimate.memory, key=lambda rank: rank.total)
    return {
        "name": config.name,
        "model": {
            "family": model.family,
            "parameters": ledger.num_params(model),
            "trained_parameters": ledger.trained_params(model),
            "quantized": _quantized(model),
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
        "placement": placement(layout, cluster, experts=bool(divisibility(model).experts)),
        "objective": _objective(config, job, estimate),
        "precision": asdict(job.precision),
        **({"numerics": _numerics(config, job)} if cluster.device.kind == "cpu" else {}),
        **({"kernels": _numerics(config, job)} if cluster.device.is_gpu else {}),
        "batch": {
            "seq_len": batch.seq_len,
            "tokens_per_step": batch.tokens_per_step,
            "sequences": batch.sequences,
            "microbatches": batch.microbatches(layout),
            "train_flops_per_step": job.step_flops(),
        },
        "memory": {**asdict(fullest), "total": fullest.total},
        **({} if job.rollout is None else {"rollout": rollout_data(job, estimate)}),
    }


def _objective(config: PlanConfig, job: Job, estimate: Estimate) -> dict[str, Any]:
    """Return the kind of the objective and its options, its reference, the passes that its loss needs, and its rate.

    `reference_seconds`: estimated seconds of the pass that stores the reference's log-probs, for a million tokens of
    data; None without such a pass, and without an estimate of the device's speed.
    `usual_lr`: the usual peak learning rate, see `kumi.config.usual_rate`; None without one.
    """
    from kumi.config.usual_rate import usual_rate

    section, reference, kinds = config.objective, None, dict(estimate.time)
    stored = section.compares and config.reference.kind == "stored"
    if section.reads_reference:
        reference = config.reference.model or _own_reference(config, stored=stored)
    rollout = config.rollout
    forward = sum(kinds.get(kind, 0.0) for kind in ("forward", "bubble")) * (2 if section.rows.mismatched else 1)
    has_speed = job.cluster.device.peak_flops(job.precision.matmul_dtype) is not None
    return {
        "kind": section.kind,
        **section.given,
        "reference": reference,
        "reference_seconds": forward / estimate.tokens_per_step * 1e6 if stored and has_speed else None,
        "head_again": _computes_head_again(job, estimate.layout),
        "forward_passes": job.passes.mean_forwards(1 if job.rollout is None else job.rollout.updates),
        "lr": job.optim.lr,
        "usual_lr": usual_rate(section.kind, config.model.init, adapters=config.lora is not None),
        "rollout": None if rollout is None else rollout.model_dump(),
        **({} if job.critic is None else {"critic": _critic(config, job)}),
    }


def _critic(config: PlanConfig, job: Job) -> dict[str, Any]:
    """Return the model from which a critic begins, its learning rate and clips."""
    section = config.critic
    return {
        "from": section.model or "the policy before step 1",
        "lr": section.rate(job.optim.lr),
        "grad_clip": job.optim.grad_clip if section.grad_clip is None else section.grad_clip,
        "value_clip": section.value_clip,
    }


def _own_reference(config: PlanConfig, *, stored: bool) -> str:
    """Return in words what the reference is where reference.model is unset. `stored`: its log-probs are stored before
    the first step."""
    if stored:
        return "the policy"
    if config.rollout is None or config.off_adapters_are_reference:
        return "the policy without its adapters"
    return "the policy before step 1, as a second model in memory"


def _numerics(config: PlanConfig, job: Job) -> dict[str, Any]:
    """Return by which kernels the device computes, None if still to be measured, and the timings that decided it.

    `milliseconds`: operation -> implementation -> milliseconds measured on this machine; empty if they do not apply.
    """
    from kumi.config.numerics import asked_settings, chosen_of, read_cached_numerics, this_gpu, this_processor

    cluster = job.cluster
    is_cpu = cluster.device.kind == "cpu"
    processor = this_processor(cluster.devices_per_node) if is_cpu else this_gpu(cluster.device.name)
    numerics, measured = job.numerics, read_cached_numerics(processor)
    own = measured is not None and (config.cluster.source == "auto" or not is_cpu)
    chosen = None if measured is None else measured.numerics if is_cpu else chosen_of(measured, asked_settings(config))
    seconds = measured.seconds if measured is not None and own and numerics == chosen else {}
    return {
        "chosen": None if numerics is None else str(numerics) if is_cpu else kernels_text(numerics.kernels),
        "milliseconds": {
            operation: {name: round(1e3 * value, 3) for name, value in timings.items()}
            for operation, timings in seconds.items()
        },
    }


def render_description(description: dict[str, Any]) -> RenderableType:
    """Return the data of `describe_resolved` or `describe_plan` as a table for the terminal."""
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    for label, text in _rows(description):
        table.add_row(label, text)
    return table


def _quantized(model: ModelSpec) -> dict[str, Any] | None:
    """Return the format, the number and the bytes of the quantized parameters of `model`; None without any."""
    sizes = [param.numel for param in ledger.params(model) if param.quantized]
    if model.lora is None or not sizes:
        return None
    size = NF4_BLOCK_BYTES * sum(nf4_blocks(numel) for numel in sizes)
    return {"format": model.lora.quantize, "parameters": sum(sizes), "bytes": size}


def _quantized_rows(quantized: dict[str, Any] | None, layout: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the row on quantized parameters, with their bytes on all ranks that share them; none without any."""
    if quantized is None:
        return []
    ranks = layout["tp"] * layout["pp"] * (layout["dp_shard"] * layout["cp"] if layout["zero"] == 3 else 1)
    sharded = f", over {ranks} ranks" if ranks > 1 else ""
    count, size = format_count(quantized["parameters"]), format_bytes(quantized["bytes"])
    return [("", f"{count} frozen parameters in four bits ({quantized['format']}): {size}{sharded}")]


def _rows(description: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the rows (label, text) of `render_description`."""
    model, batch, layout = description["model"], description["batch"], description["layout"]
    memory, cluster, precision = description["memory"], description["cluster"], description["precision"]
    ranks = cluster["devices_per_node"] * cluster["nodes"]
    dp = layout["dp_replicate"] * layout["dp_shard"]
    details = {"pp": f" ({layout['schedule']})", "cp": f" ({layout['context']})" if layout["context"] != "ring" else ""}
    axes = [f"{axis} {layout[axis]}{details.get(axis, '')}" for axis in (*AXES, "ep", "expert_tp") if layout[axis] > 1]
    kinds = [f"{kind} {format_bytes(size)}" for kind, size in memory.items() if kind != "total" and size]
    offload = f", {layout['offload']} offloaded" if layout["offload"] != "none" else ""
    trained = (
        ""
        if model["trained_parameters"] == model["parameters"]
        else f" ({format_count(model['trained_parameters'])} trained)"
    )
    length = [("length", _length(batch))] if "steps" in batch else []
    return [
        (
            "run",
            f"{description['name']} -> {description['out']}"
            if "out" in description
            else f"{description['name']}, only planned",
        ),
        (
            "model",
            f"{model['family']}, {format_count(model['parameters'])} parameters{trained}, "
            f"{model['layers']} layers, hidden size {model['hidden_size']}, vocabulary {model['vocab_size']}, "
            f"{model['init']} weights",
        ),
        *_quantized_rows(model["quantized"], layout),
        *(("", note) for note in model["notes"]),
        ("machines", f"{ranks} x {cluster['device']}, {format_bytes(cluster['memory_bytes'])} each"),
        (
            "layout",
            f"{', '.join(axes) or 'one rank'}; ZeRO {layout['zero']}, microbatch {layout['microbatch']}, "
            f"recompute {layout['recompute']}{offload}",
        ),
        *_objective_rows(description["objective"]),
        *_rollout_rows(description.get("rollout")),
        ("precision", f"{precision['compute']} compute, {precision['param']} weights, {precision['reduce']} reduction"),
        *((key, _numerics_text(description[key])) for key in ("numerics", "kernels") if key in description),
        (
            "step",
            f"{format_count(batch['tokens_per_step'])} tokens = {dp} data-parallel ranks x "
            f"{batch['microbatches']} microbatches x {layout['microbatch']} sequences x {batch['seq_len']}",
        ),
        *length,
        ("memory", f"{format_bytes(memory['total'])} per rank (estimated): {', '.join(kinds)}"),
    ]


def _computes_head_again(job: Job, layout: Layout) -> bool:
    """Return True if the backward pass computes the head's logits again."""
    tokens = layout.microbatch * job.batch.seq_len // layout.cp
    kind, pipelined = job.cluster.device.kind, is_pipelined(layout.pp, layout.schedule)
    chunk = ledger.logit_chunk(-(-job.model.vocab_size // layout.tp), kind)
    return job.passes.head_again and not keeps_chunk(tokens, chunk, kind, pipelined=pipelined)


def _objective_rows(objective: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the rows of an objective other than language modelling."""
    not_options = (
        "kind",
        "reference",
        "reference_seconds",
        "head_again",
        "forward_passes",
        "lr",
        "usual_lr",
        "rollout",
        "critic",
    )
    options = ", ".join(f"{name} {value}" for name, value in objective.items() if name not in not_options)
    if objective["kind"] == "lm":
        return []
    work = ["the head's logits twice"] if objective["head_again"] else []
    if objective["forward_passes"]:
        unit = "step" if objective["rollout"] is None else "rollout batch"
        work.append(f"{objective['forward_passes']:g} more forward passes a {unit}")
    rows = [("objective", "; ".join([f"{objective['kind']}{options and f' ({options})'}", *work]))]
    if objective["reference"] is not None:
        text, seconds = objective["reference"], objective["reference_seconds"]
        if seconds is not None:
            text += f", one pass over the data before step 1: about {format_seconds(seconds)} a million tokens"
        rows.append(("reference", text))
    if "critic" in objective:
        critic = objective["critic"]
        rows.append(("critic", f"a second model that is trained, from {critic['from']}; lr {critic['lr']:.3g}"))
    if objective["usual_lr"] is not None:
        rows.append(("lr", _rate_text(objective["kind"], objective["lr"], objective["usual_lr"])))
    if objective["rollout"] is not None:
        rows.append(("rollouts", _rollout_text(objective["rollout"])))
    return rows


def _rollout_text(rollout: dict[str, Any]) -> str:
    """Return the size of a rollout batch, and the updates with it."""
    updates = rollout["updates"] * rollout["passes"]
    more = "; groups of equal rewards are replaced" if rollout["dynamic"] else ""
    size = f"{rollout['prompts']} prompts x {rollout['group_size']} replies of up to {rollout['max_new_tokens']} tokens"
    return f"{size} for {updates} update{'' if updates == 1 else 's'}{more}"


def _rollout_rows(rollout: dict[str, Any] | None) -> list[tuple[str, str]]:
    """Return the rows of the estimates of rollouts."""
    if rollout is None:
        return []
    return [("", length_line(rollout)), ("", time_line(rollout)), ("", memory_line(rollout))]


def _rate_text(kind: str, rate: float, usual: float) -> str:
    """Return the learning rate, and by how much it is above the usual one for pretrained weights."""
    if rate == usual:
        return f"{rate:g}, the usual one of {kind} on pretrained weights"
    if rate >= _HIGH_RATE * usual:
        times = f"{rate / usual:.3g} times the {usual:g} that is usual for {kind} on pretrained weights"
        return f"{rate:g}, {times}: so high a rate may ruin the model"
    return f"{rate:g}; {usual:g} is usual for {kind} on pretrained weights"


def _length(batch: dict[str, Any]) -> str:
    """Return the length of the run in steps, tokens and epochs."""
    epochs = "" if batch["epochs"] is None else f"{batch['epochs']:g} epoch{'s' if batch['epochs'] != 1 else ''}"
    if batch["steps"] is None:
        return f"{epochs}; steps follow from the data, which is not prepared"
    return f"{batch['steps']} steps, {format_count(batch['tokens'])} tokens{epochs and f': {epochs}'}"


def _numerics_text(numerics: dict[str, Any]) -> str:
    """Return by which kernels the device computes, with the speedup of the fastest over the slowest per operation."""
    if numerics["chosen"] is None:
        return "measured at the first start on this machine, in seconds"
    speedups = []
    for operation, timings in numerics["milliseconds"].items():
        fast, slow = min(timings, key=timings.__getitem__), max(timings, key=timings.__getitem__)
        speedups += [f"{operation}: {fast} {timings[slow] / timings[fast]:.2g}x {slow}"] if fast != slow else []
    return f"{numerics['chosen']} (measured: {', '.join(speedups)})" if speedups else str(numerics["chosen"])


def render_data(inspection: dict[str, Any]) -> RenderableType:
    """Return the data of `kumi.data.inspect` as tables: sources, their first documents, the first records left out."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    columns = ("source", "documents", "tokens", "held-out documents", "held-out tokens", "left out")
    table = Table(*columns, box=None, pad_edge=False)
    for source in inspection["sources"]:
        faults = ", ".join(f"{count} {kind}" for kind, count in source["faults"].items()) or "0"
        counts = ("train_documents", "train_tokens", "validation_documents", "validation_tokens")
        table.add_row(source["path"], *(f"{source[name]:,}" for name in counts), faults)
    parts: list[RenderableType] = [table, Text()]
    commits = {path: commit for source in inspection["sources"] for path, commit in source.get("commits", {}).items()}
    if commits:
        parts += [*(Text(f"{path}: commit {commit}") for path, commit in commits.items()), Text()]
    for source in inspection["sources"]:
        if "examples" in source:
            parts += [*map(Text, unit_lines(source)), Text()]
    if "run" in inspection:
        parts += [*map(Text, ("The run reads:", *reading_lines(inspection["run"]))), Text()]
    for source in inspection["sources"]:
        for number, document in enumerate(source["documents"]):
            head = f"{source['name']} document {number}, {document['tokens']} tokens, ids {document['first_ids']} ..."
            parts += [Text(f"{head} {document['last_ids']}", style="bold"), Text(document.get("text", "")), Text()]
    parts += [Text(f"left out: {item['file']}:{item['line']}: {item['reason']}") for item in inspection["first_faults"]]
    return Group(*parts)
