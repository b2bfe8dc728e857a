"""`kumi train`: check everything, claim the folder, prepare the data, start the ranks, export what they trained."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from kumi import hub
from kumi.config import ResolvedRun, RunConfig, open_run, pin_layout
from kumi.config.job_sections import LayoutSection
from kumi.config.model_source import fetch_url_weights, hub_sources
from kumi.config.resolve import with_plan, with_prepared_data
from kumi.config.reward_section import model_rewards
from kumi.config.run_plan import RunPlan, parse_plan
from kumi.data import Store
from kumi.doctor.here import checkpoint_space
from kumi.doctor.run_doctor import check_before_training
from kumi.errors import OK, ConfigError, KumiError, LayoutError, ModelError
from kumi.launch.agent import HeadLink, HeadProbe, run_as_agent
from kumi.launch.early_failure import telling_others_of_errors
from kumi.launch.launchers import pick_launcher
from kumi.launch.local import rank_environment, run_node_ranks
from kumi.launch.standing import LaunchedRank, Standing, find_standing, launched_rank
from kumi.paths import shown_path
from kumi.remote.addresses import is_url
from kumi.remote.cache_folder import local_run_folder
from kumi.report.reading_lines import describe_reading, reading_lines
from kumi.report.run_description import describe_resolved, make_console, render_description
from kumi.spec.families import check_trainable
from kumi.spec.model import ModelSpec
from kumi.spec.numerics import parse_numerics
from kumi.spec.schedules import FULL_BACKWARD
from kumi.spec.sharding import checkpoint_bytes
from kumi.storage.folders import check_free_space, checkpoint_root, latest, list_complete, step_of
from kumi.train.best_checkpoint import check_metric, ended_early
from kumi.train.callbacks import Listener
from kumi.train.dataset_commits import dataset_paths, dataset_snapshots
from kumi.train.measure_numerics import with_measured_numerics, with_numerics
from kumi.train.prepare_data import check_data, open_data, prepare_data
from kumi.train.remote_run import SHARED_CACHE, check_shared_folder, mark_folder, mirrored, pull_remote, reserve_disk
from kumi.train.reward_model_files import check_reward_models
from kumi.train.run_folder import claim_run_folder, run_token
from kumi.train.run_summary import summary_lines
from kumi.units import format_count, parse_duration

if TYPE_CHECKING:
    from kumi.launch.rendezvous import Rendezvous


def start(
    config: RunConfig,
    *,
    allow_change: Sequence[str] = (),
    listener: Listener | None = None,
    standing: Standing | LaunchedRank | None = None,
) -> int:
    """Start or resume the run of `config` and write its Hugging Face folder. Return the exit code (see kumi.errors).

    Under an outside launcher of ranks (torchrun, srun), every rank calls this function. In another run on several
    nodes, one process on every node calls it: the node's agent, which starts the ranks of its node. The agents connect
    to the head, a process that node 0 starts. `standing`: the rank, or the node of the agent, that this process is; by
    default the environment says which, or that this process is alone. `listener` receives the training's events on
    rank 0.
    """
    standing = find_standing(os.environ) if standing is None else standing
    if isinstance(standing, Standing):
        if standing.node == 0:
            with telling_others_of_errors(standing):
                pull_remote(config)
        finished = _trained_run(config)
        if finished is not None:  # the other nodes may have ended for good, so this one must not wait for them
            os.environ.update(rank_environment(finished.cluster.devices_per_node, os.environ))
            return OK if standing.node else _lead(with_measured_numerics(finished), allow_change, None, listener)
        check_before_training(config, standing)  # now, because it uses the port of the head that node 0 starts below
        with telling_others_of_errors(standing):
            token = _token(config, standing)
        lost_after_s = parse_duration(config.recover.lost)
        return run_as_agent(standing, token, lost_after_s, partial(_start_node, config, allow_change, listener))
    pull_remote(config, show=standing is None or standing.rank == 0)
    run = open_run(config)
    # OpenMP reads these variables once, when torch is imported, and any call below may import torch.
    os.environ.update(rank_environment(run.cluster.devices_per_node, os.environ))
    _check_ranks(run, standing)
    if standing is None or standing.rank == 0:
        run = with_measured_numerics(run)  # this forks, so it must come before this process starts threads
    check_before_training(config, standing, run.job)
    if standing is None or standing.world_size == 1:
        return _lead(run, allow_change, None, listener)
    from kumi.launch.rendezvous import rendezvous

    with rendezvous(standing) as peers:
        return _join(run, peers) if standing.rank else _lead(run, allow_change, peers, listener)


def _token(config: RunConfig, standing: Standing) -> str:
    """Return the secret of the run's nodes, which is in the folder that they share."""
    out = local_run_folder(config.train.out)
    remedy = SHARED_CACHE if is_url(config.train.out) else "let train.out be a folder that all nodes share"
    return run_token(out, node=standing.node, remedy=remedy, has_head=HeadProbe(standing).has_head)


def _start_node(config: RunConfig, allow_change: Sequence[str], listener: Listener | None, link: HeadLink) -> int:
    """Start the run as the agent of one of its nodes. Return the exit code of this node."""
    node = link.standing.node
    run = open_run(config)
    os.environ.update(rank_environment(run.cluster.devices_per_node, os.environ, nodes=link.standing.nodes))
    _check_ranks(run, link.standing)
    if node == 0:
        run = with_measured_numerics(run)  # this forks, so it must come before this process starts threads
    link.start_thread()  # the thread by which the head can end this agent
    return _join(run, link) if node else _lead(run, allow_change, link, listener)


def _lead(
    run: ResolvedRun, allow_change: Sequence[str], peers: Rendezvous | HeadLink | None, listener: Listener | None
) -> int:
    """Lead the run as rank 0 of the launched ranks `peers`, or as node 0 of several; if `peers` is None, as the process
    that starts all ranks."""
    if run.config.export.push is not None:
        hub.check_push(run.config.export.push, "export.push")
    _fetch_weights(run)
    check_run(run)
    lines = [f"layout     {run.change}"] if run.change else []
    config, plan = _config_and_plan(run)
    with claim_run_folder(run.out, config, allow_change, lambda: lines.extend(_resume_notes(run, allow_change)), plan):
        asked = {**hub_sources(run.config), **dataset_paths(run)}
        hub.write_record(run.out, asked, {**run.snapshots, **dataset_snapshots(run)})
        make_console().print(render_description(describe_resolved(run)))
        for line in lines:
            print(line, flush=True)
        if is_url(run.config.train.out):
            models = run.job.models
            reserve_disk(run, sum(checkpoint_bytes(model, run.precision, run.optim) for model in models))
        store = prepare_data(run)
        print(_data_line(store, run.config.objective.kind), flush=True)
        if run.config.checkpoint.best is not None:
            objective, tasks = run.config.objective.build(), run.config.eval.tasks
            check_metric(run.config.checkpoint.best, objective, store.validation_names, tasks)
        run = with_prepared_data(run)
        trained = _is_trained(run)
        for number, line in enumerate(reading_lines(describe_reading(run, store))):
            print(f"{'' if number else 'reads':<11}{line}", flush=True)
        if peers is not None:
            message = {"finished": trained, "numerics": str(run.numerics), "plan": run.plan.plain()}
            peers.broadcast(json.dumps({**message, "folder_mark": mark_folder(run)}))
        with mirrored(run):
            code = OK if trained else _launch(run, store, peers, listener)
            if code == OK:
                from kumi.train.finish import finish
                from kumi.train.process_memory import convert_memory_errors

                with convert_memory_errors(run):
                    finish(run, store, just_trained=not trained)
        for line in summary_lines(run, code, already_finished=trained):
            print(line, flush=True)
        return code


def _join(run: ResolvedRun, peers: Rendezvous | HeadLink) -> int:
    """Take part as a launched rank or a node other than 0: wait until rank 0 or node 0 has prepared the data, then
    train."""
    _fetch_weights(run)
    check_run(run)
    message = json.loads(peers.receive())
    if message["finished"]:
        return OK
    check_shared_folder(run.config, message["folder_mark"])
    # If this rank's run file pins another layout than rank 0's, `with_plan` keeps the pinned layout, so that
    # kumi.train.compare_ranks finds the difference and raises on all ranks.
    run = with_plan(
        with_numerics(run, parse_numerics(message["numerics"])), parse_plan(message["plan"], "rank 0's plan")
    )
    return _launch(run, open_data(run), peers, None)


def _config_and_plan(run: ResolvedRun) -> tuple[RunConfig, RunPlan | None]:
    """Return the configuration and the plan for the run folder.

    A finished run keeps the layout that trained it, even if this launch is on other machines.
    """
    if not _is_trained(run):
        return run.config, run.plan
    plan = None if run.stored is None else run.stored.plan
    if plan is not None:
        return pin_layout(run.config, plan.layout), plan
    return run.config.model_copy(update={"layout": LayoutSection.model_validate(dict(run.pinned))}), None


def _fetch_weights(run: ResolvedRun) -> None:
    """Download the weights of the model, the reference, the critic and the reward models that are on a hub or at a
    URL."""
    if "model.source" in run.snapshots and run.config.model.init == "pretrained":
        hub.fetch_weights(run.snapshots["model.source"])
    rewards = model_rewards(run.config.rewards)
    for key in ("reference.model", "critic.model", *rewards):
        if key in run.snapshots:
            hub.fetch_weights(run.snapshots[key])
    fetch_url_weights(run.config.model.source if run.config.model.init == "pretrained" else None)
    others = (run.config.reference.model, run.config.critic.model)
    for source in (*others, *(reward.source for reward in rewards.values())):
        fetch_url_weights(source)


def check_run(run: ResolvedRun) -> None:
    """Raise a KumiError, such as ConfigError or ModelError, unless the run can start. Write nothing."""
    check_trainable(run.model)
    _check_compiled(run)
    _check_adapters(run)
    check_data(run)
    if run.config.eval.tasks:
        from kumi.train.task_evaluation import check_tasks

        check_tasks(run)
    _check_samples(run)
    if run.config.model.init == "pretrained":
        _check_weights(run)
    check_reward_models(run)
    if run.job.critic is not None and run.critic_folder is not None:
        _check_critic(run.job.critic, run.critic_folder)
    check_free_space(checkpoint_root(run.out), checkpoint_space(run.config, run.job, run.out))


def _resume_notes(run: ResolvedRun, allow_change: Sequence[str]) -> list[str]:
    """Return the lines of `kumi.train.resume.resume_notes`, which raises RefusedError if the run cannot resume."""
    if not list_complete(checkpoint_root(run.out)):
        return []  # a new run need not import torch yet, as the next line does
    from kumi.train.resume import resume_notes

    return resume_notes(run, allow_change)


def _check_ranks(run: ResolvedRun, standing: Standing | LaunchedRank | None) -> None:
    """Raise LayoutError unless the ranks or nodes that were started are those of the run."""
    needed, cluster = run.layout.world_size, run.cluster
    if isinstance(standing, Standing):
        if standing.nodes != cluster.nodes:
            raise LayoutError(
                f"cluster.nodes={cluster.nodes}, but {standing.source} starts {standing.nodes} nodes; set "
                f"cluster.nodes={standing.nodes}, or start {cluster.nodes}"
            )
        if standing.local_ranks not in (None, cluster.devices_per_node):
            raise LayoutError(
                f"cluster.devices_per_node={cluster.devices_per_node}, but {standing.source} gives each node "
                f"{standing.local_ranks} devices; let both be the same"
            )
        return
    pick_launcher(run, standing)
    if standing is not None and standing.world_size != needed:
        raise LayoutError(
            f"the layout needs {needed} ranks, but WORLD_SIZE={standing.world_size}; start {needed} ranks, or set "
            f"cluster and layout for {standing.world_size}"
        )


def _check_compiled(run: ResolvedRun) -> None:
    """Raise LayoutError if compiled layers cannot have the run's schedule or adapters, or if float8 products would run
    in uncompiled layers."""
    schedule = run.layout.schedule
    if run.precision.products == "float8" and not run.compiles:
        raise LayoutError(
            "precision.kind='fp8' is slower than bf16 with train.compile=false, because uncompiled layers find the "
            "scales and round in passes over memory of their own; set train.compile=true, or precision.kind='bf16'"
        )
    if run.compiles and schedule not in FULL_BACKWARD:
        raise LayoutError(
            f"layout.schedule={schedule} defers weight gradients, which compiled layers cannot do; set "
            f"train.compile=false, or layout.schedule to {', '.join(FULL_BACKWARD[:-1])} or {FULL_BACKWARD[-1]}"
        )
    lora = run.model.lora
    if run.compiles and lora is not None and (lora.dropout or lora.quantize):
        raise LayoutError(
            f"train.compile=true with lora.dropout={lora.dropout:g} and lora.quantize={lora.quantize or 'none'!r} is "
            f"unsupported, because compiled layers have neither dropout nor dequantisation; set train.compile=false, "
            f"or lora.dropout=0 and lora.quantize='none'"
        )


def _check_adapters(run: ResolvedRun) -> None:
    """Raise ConfigError unless the packages and adapter weights that the run's adapters need are available."""
    section = run.config.lora
    if section is None:
        return
    if section.quantize != "none" and find_spec("bitsandbytes") is None:
        raise ConfigError(
            f"lora.quantize={section.quantize!r} needs the package bitsandbytes, which is not installed; pip install "
            f"bitsandbytes, or set lora.quantize='none'"
        )
    if section.source is not None:
        from kumi.convert.hf.adapter_read import adapters_reader

        adapters_reader(Path(os.path.expanduser(section.source)), run.model)


def _check_samples(run: ResolvedRun) -> None:
    """Raise ConfigError or DataError if sample.prompts names a file of prompts that cannot be used.

    A tokenizer that is yet to be trained encodes them only later.
    """
    section = run.config.sample
    if isinstance(section.prompts, str):
        from kumi.inference.prompt_files import read_prompts
        from kumi.train.samples import encode_prompts

        if isinstance(run.config.data.tokenizer, str):
            encode_prompts(run)
        else:
            read_prompts(Path(section.prompts).expanduser(), "sample.prompts")


def _check_weights(run: ResolvedRun) -> None:
    """Raise ModelError unless the weight files fit the model. Only the files' headers are read here."""
    assert run.source is not None, "the configuration allows pretrained weights only with a source"
    from kumi.convert.hf import read_folder

    if not any(run.source.glob("*.safetensors")) and not any(run.source.glob("*.bin")):
        raise ModelError(
            f"model.source: {run.source} has no .safetensors or .bin file; add the weights, or set model.init=random"
        )
    read_folder.locate_params_by_headers(run.source, read_folder.spec_of_folder(run.source, run.base))


def _check_critic(critic: ModelSpec, folder: Path) -> None:
    """Raise ModelError unless the weight files in `folder` fit the critic, but for its head."""
    from kumi.convert.hf import read_folder

    if not (folder / "config.json").is_file():
        raise ModelError(
            f"critic.model: {shown_path(str(folder))} has no config.json; name a Hugging Face model folder"
        )
    spec = read_folder.spec_of_folder(folder, replace(critic, lora=None))
    read_folder.locate_params_by_headers(folder, spec)


def _is_trained(run: ResolvedRun) -> bool:
    """Return True if only the export remains to be done: the last step has its checkpoint, and the file exists with
    which `kumi.train.finish` compares the export."""
    last = latest(checkpoint_root(run.out))
    if last is None or run.planned_steps is None:
        return False
    ended = ended_early(run.out, run.config.checkpoint.best, run.config.train.patience)
    return step_of(last) >= (run.planned_steps if ended is None else ended) and (run.out / "probe.safetensors").exists()


def _trained_run(config: RunConfig) -> ResolvedRun | None:
    """Return the run of `config` if only its export remains to be done; None otherwise, or if it cannot be opened."""
    if latest(checkpoint_root(local_run_folder(config.train.out))) is None:
        return None
    with suppress(KumiError):  # it is raised again in `_start_node`, once the nodes are connected and all learn of it
        run = open_run(config)
        return run if _is_trained(run) else None
    return None


def _launch(run: ResolvedRun, store: Store, peers: Rendezvous | HeadLink | None, listener: Listener | None) -> int:
    """Wait for `peers`, then train on the ranks that this process is or starts. Return the exit code."""
    # This imports torch before the ranks are forked, so that they need not import it.
    from kumi.train.loop import train_rank

    if peers is not None:
        peers.wait_for_all()
    arguments = (run, store, listener)
    if isinstance(peers, HeadLink):
        nproc, logs = run.cluster.devices_per_node, run.out / "logs"
        return run_node_ranks(train_rank, arguments, nproc=nproc, log_dir=logs, link=peers)
    return pick_launcher(run, launched_rank(os.environ)).start(run, train_rank, arguments)


def _data_line(store: Store, objective: str) -> str:
    """Return the line for the terminal on the size of the data. `objective`: its kind."""
    faults = sum(store.faults.values())
    skipped = (
        f"; {faults} records skipped, listed in {_relative_to_cwd(store.folder / 'faults.jsonl')}" if faults else ""
    )
    entropy = f"; unigram entropy {store.unigram_entropy:.4f} nats per token" if objective == "lm" else ""
    return (
        f"data       {format_count(store.documents)} documents: {format_count(store.train_tokens)} tokens to train on, "
        f"{format_count(store.validation_tokens)} held out{entropy}{skipped}"
    )


def _relative_to_cwd(path: Path) -> str:
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)
