"""The state of a run on one rank, and the tensors and metadata that a checkpoint stores."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import nn

from kumi import __version__
from kumi.config import ResolvedRun
from kumi.config.local_machine import cpu_name
from kumi.config.pinned_run import layout_keys
from kumi.convert.base_digest import base_digest
from kumi.convert.hf.origin import UNKNOWN, Origin, origin_of
from kumi.data import BatchSource, SequentialSampler, Store
from kumi.objectives import Objective
from kumi.parallel.grad_norm import LossScale
from kumi.parallel.mesh import Mesh
from kumi.parallel.optim.optimizer import Optimizer
from kumi.parallel.state_tensors import model_pieces, optimizer_pieces, owned_pieces, parameter_name, spec_of
from kumi.rollout.rollout_source import RolloutSource
from kumi.spec import families
from kumi.spec.ledger import trained_names
from kumi.spec.model import ModelSpec
from kumi.spec.numerics import REFERENCE
from kumi.spec.saved_tensors import CRITIC_PREFIX, model_digest
from kumi.storage.checkpoint import Piece
from kumi.train.critic import Critic
from kumi.train.prepare_data import tokenizer_folder
from kumi.train.reward_model_files import REWARD_MODELS
from kumi.train.run_objective import run_objective
from kumi.train.task_evaluation import RunTasks
from kumi.train.warmup import warmup_meta


@dataclass
class TrainState:
    """The counters of a run, the same on all ranks. Everything else about a run is immutable or a tensor."""

    step: int = 0  # updates done
    tokens: int = 0  # tokens trained on
    scale: LossScale = field(default_factory=LossScale)
    saved: int | None = None  # step of the last checkpoint whose save has begun, or that was restored


@dataclass(frozen=True)
class RankState:
    """Everything that one rank trains with."""

    run: ResolvedRun
    mesh: Mesh
    model: nn.Module
    optimizer: Optimizer
    data: BatchSource
    validation: SequentialSampler | None  # held-out sequences; None without any
    store: Store
    probe_ids: npt.NDArray[np.int64]  # (3, S): tokens for the comparison of export and model, the same on all ranks
    tasks: RunTasks | None = None  # the tasks of [eval]; None without any
    rollouts: RolloutSource | None = None  # `data`, if the run generates it; else None
    critic: Critic | None = None  # trained beside the model, if the advantages need one; else None

    @cached_property
    def objective(self) -> Objective:
        """The training objective of the run."""
        return run_objective(self.run)


def checkpoint_pieces(rank_state: RankState) -> list[Piece]:
    """Return the pieces (slices of global tensors) of model, optimizer, and critic with its optimizer that this rank
    saves.

    With adapters, the frozen weights are left out.
    """
    pieces, critic = _saved_pieces(rank_state.model, rank_state.optimizer, rank_state.mesh), rank_state.critic
    if critic is not None:
        of_critic = _saved_pieces(critic.model, critic.optimizer, rank_state.mesh)
        pieces += [piece._replace(name=CRITIC_PREFIX + piece.name) for piece in of_critic]
    return pieces


def _saved_pieces(model: nn.Module, optimizer: Optimizer, mesh: Mesh) -> list[Piece]:
    """Return the pieces of a model and its optimizer that this rank saves."""
    pieces, spec = model_pieces(model, mesh), spec_of(model)
    if spec.lora is not None:
        trained = trained_names(spec)
        pieces = [piece for piece in pieces if parameter_name(piece.name) in trained]
    pieces = [*pieces, *optimizer_pieces(model, optimizer, mesh)]
    return owned_pieces(pieces, model, mesh, optimizer.optim)


def checkpoint_meta(state: TrainState, rank_state: RankState) -> dict[str, Any]:
    """Return the metadata of a checkpoint: everything but tensors that a resume and an export need."""
    run = rank_state.run
    return {
        "kumi": __version__,
        "run": run.config.name,
        "step": state.step,
        "tokens": state.tokens,
        **rank_state.data.state(state.step),
        **warmup_meta(run),
        "loss_scale": state.scale.scale,
        "loss_scale_good_steps": state.scale.good_steps,
        "skipped_updates": state.scale.skipped,
        "skipped_in_a_row": state.scale.in_a_row,
        "data": rank_state.store.content,
        "model": model_digest(run.model),
        "optimizer": run.optim.kind,
        "layout": layout_keys(run.layout),
        "run_digest": run.digest,
        **cpu_arithmetic(run),
        "hf_config": run.hf_config,
        "origin": model_origin(run).plain(),
        "carried_from": passthrough_source(run),
        "tokenizer": str(tokenizer_folder(run).resolve()),
        **adapter_base(run),
        REWARD_MODELS: {} if rank_state.rollouts is None else dict(rank_state.rollouts.reward_models),
        **critic_meta(run),
    }


def cpu_arithmetic(run: ResolvedRun) -> dict[str, str]:
    """Return the CPU's name, compute dtype and numerics, which decide rounding; {} on other devices."""
    if run.cluster.device.kind != "cpu":
        return {}
    return {"cpu": cpu_name(), "compute": run.precision.compute, "numerics": str(run.numerics or REFERENCE)}


def adapter_base(run: ResolvedRun) -> dict[str, Any]:
    """Return the adapters' settings, and the folder and digest of the frozen base model; {} without adapters."""
    return _adapter_base(run.model, run.source)


def critic_meta(run: ResolvedRun) -> dict[str, Any]:
    """Return the metadata of a checkpoint by which the critic of `run` can be exported; {} without a critic."""
    if run.job.critic is None:
        return {}
    base = _adapter_base(run.job.critic, run.critic_folder or run.source)
    return {"critic": {"hf_config": families.with_score_head(run.hf_config), **base}}


def _adapter_base(model: ModelSpec, base: Path | None) -> dict[str, Any]:
    """Return the settings of the adapters of `model`, and the folder `base` with its digest; {} without either."""
    if model.lora is None or base is None:
        return {}
    return {"lora": asdict(model.lora), "base": str(base.resolve()), "base_digest": base_digest(base)}


def passthrough_source(run: ResolvedRun) -> str | None:
    """Return the source folder of tensors that are exported as they are; None if the model has no such tensors."""
    if run.source is None or run.config.model.init != "pretrained" or not run.model.weights.passthrough:
        return None
    return str(run.source.resolve())


def model_origin(run: ResolvedRun) -> Origin:
    """Return the origin of the model, for its model card: the base model, data sets, license. UNKNOWN for random
    weights."""
    if run.source is None or run.config.model.init != "pretrained":
        return UNKNOWN
    snapshot = run.snapshots.get("model.source")
    base = origin_of(run.source) if snapshot is None else origin_of(run.source, snapshot.name, snapshot.commit)
    trained_on, license = run.config.export.datasets, run.config.export.license
    return replace(
        base, relation="finetune", datasets=trained_on, license={"license": license} if license else base.license
    )
