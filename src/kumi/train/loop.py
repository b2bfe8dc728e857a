"""The training loop of one rank: build, restore, then train step by step until the end or a stop signal.

mesh -> model -> optimizer -> data -> restore -> [step -> report -> evaluate data and tasks -> save]* -> export probe
"""

from __future__ import annotations

import gc
import os
import secrets
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from signal import SIGTERM, Signals
from typing import Any

import torch

from kumi.config import ResolvedRun
from kumi.config.run_length import run_mixture
from kumi.data import BatchSource, Store
from kumi.errors import OK, DivergedError, NothingTrainedError, SaveError
from kumi.launch.signals import StopFlag, exit_code, install
from kumi.nn.attention.newer_flash import use_newer_flash
from kumi.nn.decoder import Decoder
from kumi.nn.numerics import use_kernels, use_numerics
from kumi.parallel.embedding_noise import use_neftune
from kumi.parallel.mesh import Mesh, all_reduce_sum, build_mesh, close_distributed, init_distributed
from kumi.parallel.optim import build_optimizer
from kumi.parallel.stage_modules import unwrap
from kumi.parallel.state_tensors import fill_pieces, optimizer_pieces
from kumi.rollout.score_replies import ReplyScorer
from kumi.spec.model import MoE
from kumi.spec.numerics import REFERENCE
from kumi.storage import checkpoint
from kumi.storage.folders import checkpoint_root
from kumi.train.best_checkpoint import BestSoFar, best_of_run, rewrite_best
from kumi.train.callbacks import Callbacks, Listener
from kumi.train.check_reference import check_reference
from kumi.train.compare_ranks import check_agreement
from kumi.train.critic import build_critic
from kumi.train.evaluate import evaluate
from kumi.train.export_probe import probe_ids, write_probe
from kumi.train.gpu_process import collect_if_due, collect_together, record_collectives, use_matmul_precision
from kumi.train.metrics import Metrics, truncate_metrics
from kumi.train.open_batches import OpenSource, mixture_source
from kumi.train.open_rollouts import open_rollouts, open_scorer
from kumi.train.preflight import run_preflight
from kumi.train.process_memory import (
    TRIM_EVERY,
    baseline_memory,
    convert_memory_errors,
    is_out_of_memory,
    keep_freed_memory,
    trim_heap,
)
from kumi.train.reference_sums import lacks_references, make_references, open_references
from kumi.train.resume import last_checkpoint, restore_state
from kumi.train.run_models import build_policy, build_reference
from kumi.train.samples import sample_texts, write_samples
from kumi.train.step import read_step, train_step
from kumi.train.step_report import Reporter
from kumi.train.task_evaluation import RunTasks, task_values
from kumi.train.train_state import RankState, TrainState, checkpoint_meta, checkpoint_pieces
from kumi.train.warmup import with_stored_warmup


def train_rank(
    run: ResolvedRun, store: Store, listener: Listener | None = None, open_source: OpenSource = mixture_source
) -> int:
    """Train on this rank, from the run's last checkpoint if there is one. Return the exit code (see kumi.errors).

    `listener` receives the training's events on rank 0, and may end it. `open_source` opens this rank's batches.
    """
    stop = install()
    with convert_memory_errors(run):
        if run.cluster.device.is_gpu:
            record_collectives(run.out / "logs", os.environ)
        place = init_distributed(run.cluster.device.kind, timeout_s=run.config.train.timeout_s)
        check_agreement(run, place)
        mesh = build_mesh(run.layout, place, experts=_may_have_experts(run))
        with open_scorer(run, mesh) as scorer:
            code = _train(run, store, mesh, stop, listener, open_source, scorer)
    close_distributed()  # only after success: a failing rank must not wait here for other ranks
    return code


def _may_have_experts(run: ResolvedRun) -> bool:
    """Return True if the policy has routed experts, or another model of the run may have some."""
    others = run.config.rollout is not None or run.reference_folder is not None
    return others or any(isinstance(layer.mlp, MoE) for layer in run.model.layers)


def _train(
    run: ResolvedRun,
    store: Store,
    mesh: Mesh,
    stop: StopFlag,
    listener: Listener | None,
    open_source: OpenSource,
    scorer: ReplyScorer | None,
) -> int:
    """Build this rank's part of the run, train it to the end or to a stop signal, and return the exit code."""
    memory_before = baseline_memory(mesh.device)
    use_matmul_precision(mesh.device, tf32=run.config.precision.tf32)
    if mesh.device.type == "cpu":
        use_numerics(run.numerics or REFERENCE)
        keep_freed_memory()
    else:
        use_kernels((run.numerics or REFERENCE).kernels)
    rank_state, state = _build_and_restore(run, store, mesh, open_source, scorer)
    attempt = _attempt(mesh)
    saver = checkpoint.AsyncSaver(
        rank=mesh.rank, ranks=run.layout.world_size, attempt=attempt, timeout=run.config.train.timeout_s
    )
    saver.reserve(checkpoint_pieces(rank_state))
    metrics = _open_metrics(run, state) if mesh.rank == 0 else None
    if listener is None or mesh.rank != 0:
        listener = Callbacks(run.config, ())
    reporter = Reporter(rank_state, state, metrics, memory_before, listener)
    reporter.legend()
    if (run.numerics or REFERENCE).chosen("attention") in ("fa3", "fa4") and (
        newer := use_newer_flash(run.model, mesh.device)
    ):
        reporter.note(f"attention  {newer}")
    if state.step:
        counts = rank_state.data.state(state.step) if rank_state.rollouts is None else rank_state.rollouts.counts
        data = "".join(f", {value} {name}" for name, value in counts.items())
        reporter.note(f"resumed after step {state.step} ({state.tokens} tokens{data})")
    if rank_state.run.optim.warmup_steps != run.optim.warmup_steps:
        reporter.note(
            f"the warm-up stays {rank_state.run.optim.warmup_steps} steps, as in the run's first start; "
            f"optim.warmup_ratio={run.config.optim.warmup_ratio} of {run.steps} steps would be "
            f"{run.optim.warmup_steps} steps"
        )
    try:
        listener.begin(state.step, state.tokens)
        with collect_together(mesh.device):
            code = _train_steps(rank_state, state, stop, reporter, saver, attempt)
        saver.wait()
        if code == OK:
            write_probe(rank_state, run.out)
        listener.end()
        return code
    # Raised on all ranks at the same step, so the last save can complete, and a resume can use it.
    except (DivergedError, NothingTrainedError):
        saver.wait()
        raise
    except (ConnectionError, TimeoutError):  # OSErrors of the communication, not of the disk
        raise
    except OSError as error:
        if is_out_of_memory(error):
            raise
        raise SaveError(
            f"{error.filename or run.out}: cannot be written ({error.strerror or error}); free some space or make it "
            f"writable, and run the same command again to resume from the last checkpoint"
        ) from error
    finally:
        if metrics is not None:
            metrics.close()
        if rank_state.rollouts is not None:
            rank_state.rollouts.close()


def _train_steps(
    rank_state: RankState,
    state: TrainState,
    stop: StopFlag,
    reporter: Reporter,
    saver: checkpoint.AsyncSaver,
    attempt: str,
) -> int:
    """Train all remaining steps; a stop signal ends them after a save. Return the exit code."""
    config, steps, root = rank_state.run.config, rank_state.run.steps, checkpoint_root(rank_state.run.out)
    # The preflight check runs in the first step only.
    before_update: Callable[[], None] | None = partial(run_preflight, rank_state, state, root, attempt)
    best, patience = _best_so_far(rank_state), config.train.patience
    if best is not None and patience and best.since >= patience:
        return OK
    if state.step == 0:
        _compare_reference(rank_state, reporter)
    while state.step < steps:
        saver.check()
        step_batch = read_step(rank_state, state, _stop_signal(stop, reporter.listener))
        for note in () if rank_state.rollouts is None else rank_state.rollouts.take_notes():
            reporter.note(note)
        if step_batch.signal is not None:
            reporter.flush()
            _save(rank_state, state, saver, root, reporter.listener, wait=True, best=best)
            reporter.note(
                f"{Signals(step_batch.signal).name}: saved after step {state.step}; the same command resumes from there"
            )
            return exit_code(step_batch.signal)
        reporter.step(train_step(rank_state, state, step_batch, before_update))
        before_update = None
        collect_if_due(state.step)
        if _is_due(state.step, TRIM_EVERY):
            trim_heap(rank_state.mesh.device)
        last = state.step == steps
        improved = False
        if rank_state.validation is not None and (last or _is_due(state.step, config.eval.every)):
            reporter.flush()
            result = evaluate(rank_state)
            reporter.evaluation(state.step, result)
            improved = _add(best, state.step, result.values())
        if rank_state.tasks is not None and (last or _is_due(state.step, config.eval.task_interval)):
            reporter.flush()
            results = rank_state.tasks.evaluate()
            reporter.tasks(state.step, results)
            improved |= _add(best, state.step, task_values(results))
        if config.sample.prompts and _is_due(state.step, config.sample.every):
            reporter.flush()
            _sample(rank_state, state.step, reporter)
        ended = best is not None and 0 < patience <= best.since
        if last or ended or improved or _is_due(state.step, config.checkpoint.every):
            reporter.flush()
            # best.json names complete checkpoints only.
            wait = last or ended or improved or not config.checkpoint.asynchronous
            _save(rank_state, state, saver, root, reporter.listener, wait=wait, best=best)
            if improved and best is not None and rank_state.mesh.rank == 0:
                best.write(root)
        if ended and best is not None:
            reporter.note(
                f"ended after step {state.step}: eval/{best.metric} was best after step {best.step}, and no better in "
                f"{best.since} evaluations since (train.patience)"
            )
            return OK
    return OK


def _add(best: BestSoFar | None, step: int, values: Mapping[str, float]) -> bool:
    """Add the metrics `values` of an evaluation to `best`; return True if this evaluation is the best so far."""
    return best is not None and best.is_metric_of(values) and best.add(step, values.get(best.metric))


def _sample(rank_state: RankState, step: int, reporter: Reporter) -> None:
    """Write the page of samples of this step, on rank 0."""
    decoder = unwrap(rank_state.model)
    assert isinstance(decoder, Decoder), "check_run refuses layouts with stages"
    samples = sample_texts(decoder, rank_state.run, rank_state.mesh)
    if rank_state.mesh.rank == 0:
        reporter.note(f"samples    {write_samples(rank_state.run.out, step, samples)}")


def _best_so_far(rank_state: RankState) -> BestSoFar | None:
    """Return the best evaluation of the run by checkpoint.best, the same on all ranks; None without the key."""
    run = rank_state.run
    best = best_of_run(run.out, run.config.checkpoint.best)
    if rank_state.mesh.rank == 0:
        rewrite_best(run.out, best)
    if best is None:
        return None
    # Rank 0 decides: another node may see an older file.
    own = (-1.0 if best.step is None else best.step, best.value or 0.0, best.since)
    agreed = torch.tensor(own if rank_state.mesh.rank == 0 else (0.0, 0.0, 0.0), dtype=torch.float64)
    step, value, since = all_reduce_sum(agreed.to(rank_state.mesh.device), rank_state.mesh).tolist()
    best.step, best.value, best.since = (int(step), value, int(since)) if step >= 0 else (None, None, int(since))
    return best


def _compare_reference(rank_state: RankState, reporter: Reporter) -> None:
    """If the stored reference is the initial policy, raise ConfigError unless both agree on the rows of the first
    step."""
    run = rank_state.run
    if not run.config.objective.compares or run.config.reference.kind != "stored":
        return
    if run.reference_folder is not None:
        reporter.note(
            f"reference  {run.config.reference.model}: another model than the policy, so not compared with it at step 0"
        )
        return
    batch = rank_state.data.at(0)
    check_reference(run, rank_state.store, rank_state.mesh, rank_state.model, rank_state.objective, batch)


def _stop_signal(stop: StopFlag, listener: Listener) -> int | None:
    """Return the stop signal that this rank received, SIGTERM if the listener ends the run, else None."""
    return SIGTERM if stop.requested is None and listener.control.should_training_stop else stop.requested


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _save(
    rank_state: RankState,
    state: TrainState,
    saver: checkpoint.AsyncSaver,
    root: Path,
    listener: Listener,
    *,
    wait: bool,
    best: BestSoFar | None = None,
) -> None:
    """Start saving a checkpoint, unless this step was saved already. If `wait`, return when the save is complete.

    `state.saved` says whether the step was saved. The disk cannot say it, because rank 0 renames the folder at the end
    of the save: ranks that look before and after that would decide differently.
    """
    if state.saved != state.step:
        folder, keep = checkpoint.step_folder(root, state.step), rank_state.run.config.checkpoint.keep
        protect = [] if best is None or best.step is None else [checkpoint.step_folder(root, best.step)]
        meta = checkpoint_meta(state, rank_state)
        saver.save(folder, checkpoint_pieces(rank_state), meta, keep=keep, protect=protect)
        state.saved = state.step
        listener.saving()
    if wait:
        saver.wait()


def _build_and_restore(
    run: ResolvedRun, store: Store, mesh: Mesh, open_source: OpenSource, scorer: ReplyScorer | None
) -> tuple[RankState, TrainState]:
    """Build model, optimizer and data, and load the last checkpoint if there is one. Return this rank's state and
    the counters."""
    saved = last_checkpoint(run)
    state = TrainState() if saved is None else restore_state(saved, store, run)
    run = run if saved is None else with_stored_warmup(run, saved.meta)
    objective = run.config.objective.build()
    missing = lacks_references(run, store, mesh)
    if missing and (saved is not None or run.reference_folder is not None):
        make_references(run, store, mesh, build_reference(run, mesh), objective)
        gc.collect()  # reference cycles keep the reference model's parameters in memory until then
    model = build_policy(run, mesh, None if saved is None else saved.read)
    if missing and saved is None and run.reference_folder is None:
        make_references(run, store, mesh, model, objective)
    references = open_references(run, store)
    use_neftune(model, mesh, run.config.train.neftune_alpha)
    folder = Path(os.path.expanduser(run.config.train.offload_dir or run.out / "offload"))
    optimizer = build_optimizer(model, mesh, run.optim, folder)
    if saved is not None:
        fill_pieces(optimizer_pieces(model, optimizer, mesh), saved.read)
    cross = run.config.data.cross_document
    mixture = run_mixture(run.config, store, references)
    meta = None if saved is None else saved.meta
    critic = build_critic(run, mesh, folder / "critic", None if saved is None else saved.read)
    rollouts = None
    if run.config.rollout is not None:
        rollouts = open_rollouts(run, store, mesh, model, None if critic is None else critic.model, scorer, meta)
    source: BatchSource = rollouts or open_source(run, mixture, run.layout.dp_index(mesh.rank), meta)
    validation = None
    if store.validation_tokens and rollouts is None:  # held-out prompts have no loss
        options: dict[str, Any] = {"limit": run.config.eval.sequences, "references": references}
        form = run.config.objective.rows
        validation = store.sweep(run.batch.seq_len, cross_document=cross, form=form, **options)
    tasks = RunTasks(run, model, mesh) if run.config.eval.tasks else None
    # Under sequence parallelism, the tp ranks need equal parts of a row.
    ids = probe_ids(mixture, run.layout.tp if run.layout.sequence_parallel else 1)
    return RankState(run, mesh, model, optimizer, source, validation, store, ids, tasks, rollouts, critic), state


def _attempt(mesh: Mesh) -> str:
    """Return a random name for this launch of the run, the same on all ranks.

    The name keeps the unfinished files of different launches apart.
    """
    return f"{int(all_reduce_sum(torch.tensor(secrets.randbits(48) if mesh.rank == 0 else 0), mesh)):012x}"


def _open_metrics(run: ResolvedRun, state: TrainState) -> Metrics:
    """Open the metrics of the run, without the entries of steps that will be trained again."""
    truncate_metrics(run.out / "metrics.jsonl", state.step)
    log, config = run.config.log, run.config
    return Metrics(
        run.out, name=config.name, steps=run.steps, first_step=state.step, every=log.every, trackers=log.trackers
    )
