"""What one rank does: build, restore, then step after step until the end or a signal.

mesh -> model -> optimizer -> data -> restore -> [step -> report -> evaluate -> save]* -> probe
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from functools import partial
from pathlib import Path
from signal import SIGTERM, Signals

import torch

from kumi.config import ResolvedRun
from kumi.convert import weights_reader
from kumi.convert.hf.adapter_read import adapters_reader
from kumi.data import Store
from kumi.errors import OK, DivergedError, SaveError
from kumi.launch.signals import StopFlag, exit_code, install
from kumi.nn.numerics import use
from kumi.parallel.build import build
from kumi.parallel.mesh import Mesh, build_mesh, close_distributed, init_distributed, total
from kumi.parallel.optim import build_optimizer
from kumi.parallel.state_tensors import Reader, fill, optimizer_pieces
from kumi.spec.numerics import REFERENCE
from kumi.storage import checkpoint
from kumi.train.callbacks import Callbacks, Listener
from kumi.train.compare_ranks import check_agreement
from kumi.train.evaluate import evaluate
from kumi.train.export_probe import probe_ids, write_probe
from kumi.train.metrics import Metrics, truncate_metrics
from kumi.train.open_batches import OpenSource, mixture_source
from kumi.train.preflight import fire_drill
from kumi.train.process_memory import TRIM_EVERY, keep_freed_memory, memory_errors, memory_now, out_of_memory, trim
from kumi.train.resume import last_checkpoint, restored_state
from kumi.train.run_folder import checkpoint_root
from kumi.train.step import read_step, train_step
from kumi.train.step_report import Reporter
from kumi.train.train_state import Parts, TrainState, meta, pieces
from kumi.train.warmup import with_stored_warmup


def train_rank(
    run: ResolvedRun, store: Store, listener: Listener | None = None, open_source: OpenSource = mixture_source
) -> int:
    """Train on this rank from where the run folder's last checkpoint left off; the exit code (see kumi.errors).

    `listener` is told on rank 0 how the training goes, and may end it. `open_source` opens the batches of this rank.
    """
    stop = install()
    with memory_errors(run):
        place = init_distributed(run.cluster.device.kind, timeout_s=run.config.train.timeout_s)
        check_agreement(run, place)
        code = _train(run, store, build_mesh(run.layout, place), stop, listener, open_source)
    close_distributed()  # only after success: a rank that fails must not wait there for others
    return code


def _train(
    run: ResolvedRun, store: Store, mesh: Mesh, stop: StopFlag, listener: Listener | None, open_source: OpenSource
) -> int:
    memory_before = memory_now(mesh.device)
    if mesh.device.type == "cpu":
        use(run.numerics or REFERENCE)
        keep_freed_memory()
    parts, state = _restore(run, store, mesh, open_source)
    attempt = _attempt(mesh)
    saver = checkpoint.AsyncSaver(
        rank=mesh.rank, ranks=run.layout.world_size, attempt=attempt, timeout=run.config.train.timeout_s
    )
    metrics = _metrics(run, state) if mesh.rank == 0 else None
    if listener is None or mesh.rank != 0:
        listener = Callbacks(run.config, ())
    reporter = Reporter(parts, state, metrics, memory_before, listener)
    reporter.legend()
    if state.step:
        data = "".join(f", {value} {name}" for name, value in parts.data.state(state.step).items())
        reporter.note(f"resumed after step {state.step} ({state.tokens} tokens{data})")
    if parts.run.optim.warmup_steps != run.optim.warmup_steps:
        reporter.note(
            f"the warm-up stays {parts.run.optim.warmup_steps} steps, as the run began; optim.warmup_ratio="
            f"{run.config.optim.warmup_ratio} of {run.config.train.steps} steps would be {run.optim.warmup_steps}"
        )
    try:
        listener.begin(state.step, state.tokens)
        code = _steps(parts, state, stop, reporter, saver, attempt)
        saver.wait()
        if code == OK:
            write_probe(parts, run.out)
        listener.end()
        return code
    except DivergedError:  # on all ranks at the same step: the last save can be completed, and the run goes on from it
        saver.wait()
        raise
    except (ConnectionError, TimeoutError):  # of the ranks, not of the disk
        raise
    except OSError as error:
        if out_of_memory(error):
            raise
        raise SaveError(
            f"{error.filename or run.out}: cannot be written ({error.strerror or error}); free some space or make it "
            f"writable, and run the same command again: it goes on from the last checkpoint"
        ) from error
    finally:
        if metrics is not None:
            metrics.close()


def _steps(
    parts: Parts, state: TrainState, stop: StopFlag, reporter: Reporter, saver: checkpoint.AsyncSaver, attempt: str
) -> int:
    """Every step that is left. A signal ends them after a save."""
    config, root = parts.run.config, checkpoint_root(parts.run.out)
    before_update: Callable[[], None] | None = partial(fire_drill, parts, state, root, attempt)
    while state.step < config.train.steps:
        saver.check()
        counts = read_step(parts, state, _stop_signal(stop, reporter.listener))
        if counts.signal is not None:
            reporter.flush()
            _save(parts, state, saver, root, reporter.listener, wait=True)
            reporter.note(
                f"{Signals(counts.signal).name}: saved after step {state.step}; the same command goes on from there"
            )
            return exit_code(counts.signal)
        reporter.step(train_step(parts, state, counts, before_update))
        before_update = None
        if _due(state.step, TRIM_EVERY):
            trim(parts.mesh.device)
        last = state.step == config.train.steps
        if parts.validation is not None and (last or _due(state.step, config.eval.every)):
            reporter.flush()
            reporter.evaluation(state.step, evaluate(parts))
        if last or _due(state.step, config.checkpoint.every):
            reporter.flush()
            _save(parts, state, saver, root, reporter.listener, wait=last or not config.checkpoint.asynchronous)
    return OK


def _stop_signal(stop: StopFlag, listener: Listener) -> int | None:
    """The signal this rank was sent, or SIGTERM where the listener ends the run; else None."""
    return SIGTERM if stop.requested is None and listener.control.should_training_stop else stop.requested


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _save(
    parts: Parts, state: TrainState, saver: checkpoint.AsyncSaver, root: Path, listener: Listener, *, wait: bool
) -> None:
    """Begin to save, unless this very step has been. That must not be looked up on the disk, where the ranks would see
    different things: the folder appears when rank 0 is done, and the others must not write into it again.
    """
    if state.saved != state.step:
        folder, keep = checkpoint.step_folder(root, state.step), parts.run.config.checkpoint.keep
        saver.save(folder, pieces(parts), meta(state, parts), keep=keep)
        state.saved = state.step
        listener.saved()
    if wait:
        saver.wait()


def _restore(run: ResolvedRun, store: Store, mesh: Mesh, open_source: OpenSource) -> tuple[Parts, TrainState]:
    """Model, optimizer and data as the last checkpoint left them, or as the run begins."""
    saved = last_checkpoint(run)
    state = TrainState() if saved is None else restored_state(saved, store, run)
    run = run if saved is None else with_stored_warmup(run, saved.meta)
    weights: int | Reader = run.config.train.seed
    adapters: int | Reader = run.config.train.seed if saved is None else saved.read
    if saved is not None and run.model.lora is None:
        weights = saved.read
    elif run.source is not None and run.config.model.init == "pretrained":
        weights = weights_reader(run.source, run.base)
    if saved is None and run.config.lora is not None and run.config.lora.source is not None:
        adapters = adapters_reader(Path(os.path.expanduser(run.config.lora.source)), run.model)
    model = build(
        run.model,
        mesh,
        run.precision,
        weights=weights,
        compile=run.config.train.compile,
        comm=run.comm,
        adapters=adapters,
    )
    folder = Path(os.path.expanduser(run.config.train.offload_dir or run.out / "offload"))
    optimizer = build_optimizer(model, mesh, run.optim, folder)
    if saved is not None:
        fill(optimizer_pieces(model, optimizer, mesh), saved.read)
    cross = run.config.data.cross_document
    mixture = store.mixture(run.batch.seq_len, run.config.train.seed, cross_document=cross)
    source = open_source(run, mixture, run.layout.dp_index(mesh.rank), None if saved is None else saved.meta)
    limit = run.config.eval.sequences
    held_out = store.sweep(run.batch.seq_len, cross_document=cross, limit=limit) if store.validation_tokens else None
    return Parts(run, mesh, model, optimizer, source, held_out, store, probe_ids(mixture)), state


def _attempt(mesh: Mesh) -> str:
    """A name for this start of the run that all ranks share, so that files of a dead start are never taken for ours."""
    return f"{int(total(torch.tensor(secrets.randbits(48) if mesh.rank == 0 else 0), mesh)):012x}"


def _metrics(run: ResolvedRun, state: TrainState) -> Metrics:
    truncate_metrics(run.out / "metrics.jsonl", state.step)
    log, config = run.config.log, run.config
    return Metrics(
        run.out,
        name=config.name,
        steps=config.train.steps,
        first_step=state.step,
        every=log.every,
        trackers=log.trackers,
    )
