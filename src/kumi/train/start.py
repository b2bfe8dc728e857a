"""`kumi train`: check everything, claim the folder, prepare the data, start the ranks, export what they trained."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from kumi import hub
from kumi.config import ResolvedRun, RunConfig, open_run, pinned_to
from kumi.config.model_source import hub_sources
from kumi.config.resolve import with_plan
from kumi.config.run_plan import RunPlan, parse_plan
from kumi.config.schema import LayoutSection
from kumi.data import Store
from kumi.errors import OK, ConfigError, LayoutError, ModelError
from kumi.launch.launchers import pick
from kumi.launch.local import environment
from kumi.launch.standing import Standing, standing
from kumi.report.run_description import console, describe, render
from kumi.spec.families import check_trained
from kumi.spec.numerics import parse
from kumi.spec.schedules import FULL_BACKWARD
from kumi.spec.sharding import checkpoint_bytes
from kumi.storage.folders import free_space_check, latest, list_complete, step_of
from kumi.train.callbacks import Listener
from kumi.train.measure_numerics import with_measured, with_numerics
from kumi.train.prepare_data import check_data, open_data, prepare_data
from kumi.train.run_folder import checkpoint_root, claim
from kumi.train.run_summary import summary_lines
from kumi.units import format_count

if TYPE_CHECKING:
    from kumi.launch.rendezvous import Meeting


def start(config: RunConfig, *, allow_change: Sequence[str] = (), listener: Listener | None = None) -> int:
    """Train the run of `config`, or go on with it, and write the Hugging Face folder; the exit code (see kumi.errors).

    Under an external launcher (torchrun, srun), which has started the ranks already, every rank calls this. `listener`
    is told on rank 0 how the training goes.
    """
    run = open_run(config)
    # OpenMP reads these once, when torch is imported, which everything below may do.
    os.environ.update(environment(run.cluster.devices_per_node, os.environ))
    place = standing(os.environ)
    _check_ranks(run, place)
    if place is None or place.rank == 0:
        run = with_measured(run)  # before this process has threads, which it would fork
    if place is None or place.world_size == 1:
        return _lead(run, allow_change, None, listener)
    from kumi.launch.rendezvous import meet

    with meet(place) as meeting:
        return _follow(run, meeting) if place.rank else _lead(run, allow_change, meeting, listener)


def _lead(run: ResolvedRun, allow_change: Sequence[str], meeting: Meeting | None, listener: Listener | None) -> int:
    """The start of rank 0, or of the process that starts the ranks. `meeting`: of ranks that a launcher has started."""
    if run.config.export.push is not None:
        hub.check_push(run.config.export.push, "export.push")
    _fetch_weights(run)
    check(run)
    lines = [f"layout     {run.change}"] if run.change else []
    written, plan = _to_keep(run)
    with claim(run.out, written, allow_change, lambda: lines.extend(_resumable(run, allow_change)), plan):
        hub.write_record(run.out, hub_sources(run.config), run.snapshots)
        console().print(render(describe(run)))
        for line in lines:
            print(line, flush=True)
        store = prepare_data(run)
        print(_data_line(store), flush=True)
        trained = _trained(run)
        if meeting is not None:
            meeting.say(json.dumps({"finished": trained, "numerics": str(run.numerics), "plan": run.plan.plain()}))
        code = OK if trained else _launch(run, store, meeting, listener)
        if code == OK:
            from kumi.train.finish import finish
            from kumi.train.process_memory import memory_errors

            with memory_errors(run):
                finish(run, store, anew=not trained)
        for line in summary_lines(run, code, already_finished=trained):
            print(line, flush=True)
        return code


def _follow(run: ResolvedRun, meeting: Meeting) -> int:
    """The start of a rank other than 0 that an external launcher started: rank 0 prepares, the others wait for it."""
    _fetch_weights(run)
    check(run)
    word = json.loads(meeting.hear())
    if word["finished"]:
        return OK
    # Where this rank's run file pins another layout, it keeps that, and the ranks refuse to train
    # (kumi.train.compare_ranks).
    run = with_plan(with_numerics(run, parse(word["numerics"])), parse_plan(word["plan"], "rank 0's plan"))
    return _launch(run, open_data(run), meeting, None)


def _to_keep(run: ResolvedRun) -> tuple[RunConfig, RunPlan | None]:
    """Return the configuration and the plan that the run folder gets: of a run that has done all its steps, the layout
    with which it did them, even where it is left alone on other machines now."""
    if not _trained(run):
        return run.config, run.plan
    plan = None if run.begun is None else run.begun.plan
    if plan is not None:
        return pinned_to(run.config, plan.layout), plan
    return run.config.model_copy(update={"layout": LayoutSection.model_validate(dict(run.pinned))}), None


def _fetch_weights(run: ResolvedRun) -> None:
    if "model.source" in run.snapshots and run.config.model.init == "pretrained":
        hub.fetch_weights(run.snapshots["model.source"])


def check(run: ResolvedRun) -> None:
    """Nothing, when the run can start; the reason as a ConfigError otherwise. Writes nothing."""
    check_trained(run.model)
    _check_compiled(run)
    _check_adapters(run)
    check_data(run)
    if run.config.model.init == "pretrained":
        _check_weights(run)
    root = checkpoint_root(run.out)
    size = checkpoint_bytes(run.model, run.precision, run.optim)
    # While a new checkpoint is written the kept ones are still there.
    free_space_check(root, size * max(1, run.config.checkpoint.keep + 1 - len(list_complete(root))))


def _resumable(run: ResolvedRun, allow_change: Sequence[str]) -> list[str]:
    """Return what a resume changes or cannot compare. Raise RefusedError where the last checkpoint is not the run's."""
    if not list_complete(checkpoint_root(run.out)):
        return []  # without having imported torch
    from kumi.train.resume import check_resume

    return check_resume(run, allow_change)


def _check_ranks(run: ResolvedRun, place: Standing | None) -> None:
    """Raise LayoutError unless a launcher reaches the machines of `run` and WORLD_SIZE, where set, is its layout's."""
    pick(run, place)
    needed = run.layout.world_size
    if place is not None and place.world_size != needed:
        raise LayoutError(
            f"the layout needs {needed} ranks and WORLD_SIZE={place.world_size} were started; start {needed}, or set "
            f"cluster and layout for {place.world_size}"
        )


def _check_compiled(run: ResolvedRun) -> None:
    """Nothing, unless compiled layers are to put off the gradients of their weights."""
    schedule = run.layout.schedule
    if run.config.train.compile and schedule not in FULL_BACKWARD:
        raise LayoutError(
            f"layout.schedule={schedule} puts the gradients of weights off, which compiled layers cannot; set "
            f"train.compile=false, or layout.schedule to {', '.join(FULL_BACKWARD[:-1])} or {FULL_BACKWARD[-1]}"
        )
    lora = run.model.lora
    if run.config.train.compile and lora is not None and (lora.dropout or lora.quantize):
        raise LayoutError(
            f"train.compile=true with lora.dropout={lora.dropout:g} and lora.quantize={lora.quantize or 'none'!r}: "
            f"compiled layers neither drop nor unpack; set train.compile=false, or dropout=0 and quantize='none'"
        )


def _check_adapters(run: ResolvedRun) -> None:
    """Nothing, when what the adapters of `run` need is there."""
    section = run.config.lora
    if section is None:
        return
    if section.quantize != "none" and find_spec("bitsandbytes") is None:
        raise ConfigError(
            f"lora.quantize={section.quantize!r} needs the package bitsandbytes: pip install bitsandbytes, or set "
            f"lora.quantize='none'"
        )
    if section.source is not None:
        from kumi.convert.hf.adapter_read import adapters_reader

        adapters_reader(Path(os.path.expanduser(section.source)), run.model)


def _check_weights(run: ResolvedRun) -> None:
    """The headers of the weight files alone: what they hold is read when the ranks fill the model."""
    assert run.source is not None, "the configuration allows pretrained weights only with a source"
    from kumi.convert.hf import read_folder

    if not any(run.source.glob("*.safetensors")) and not any(run.source.glob("*.bin")):
        raise ModelError(
            f"model.source: {run.source} has no .safetensors file; add the weights, or set model.init=random"
        )
    read_folder.check_headers(run.source, run.base)


def _trained(run: ResolvedRun) -> bool:
    """Whether the last checkpoint is the run's last step, and its probe is there: only the export is left."""
    found = latest(checkpoint_root(run.out))
    return found is not None and step_of(found) >= run.config.train.steps and (run.out / "probe.safetensors").exists()


def _launch(run: ResolvedRun, store: Store, meeting: Meeting | None, listener: Listener | None) -> int:
    # torch comes in here, once: ranks are forked from this process and find it imported.
    from kumi.train.loop import train_rank

    if meeting is not None:
        meeting.await_all()
    return pick(run, standing(os.environ)).start(run, train_rank, (run, store, listener))


def _data_line(store: Store) -> str:
    faults = sum(store.faults.values())
    skipped = f"; {faults} records left out, listed in {_shown(store.folder / 'faults.jsonl')}" if faults else ""
    return (
        f"data       {format_count(store.documents)} documents: {format_count(store.train_tokens)} tokens to train on, "
        f"{format_count(store.validation_tokens)} held out; unigram entropy {store.unigram_entropy:.4f} nats a token"
        f"{skipped}"
    )


def _shown(path: Path) -> str:
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)
