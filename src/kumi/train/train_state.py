"""What changes while a run trains, and how it is saved and found again."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import nn

from kumi import __version__
from kumi.config import ResolvedRun
from kumi.config.local_machine import cpu_name
from kumi.config.pinned_run import spelled
from kumi.convert.base_digest import digest
from kumi.convert.hf.origin import UNKNOWN, Origin, origin_of
from kumi.data import BatchSource, Store, Sweep
from kumi.objectives import OBJECTIVES, Objective
from kumi.parallel.grad_norm import LossScale
from kumi.parallel.mesh import Mesh
from kumi.parallel.optim.optimizer import Optimizer
from kumi.parallel.state_tensors import model_pieces, optimizer_pieces, owned
from kumi.spec.adapters import is_adapter
from kumi.spec.numerics import REFERENCE
from kumi.spec.saved_tensors import model_digest
from kumi.storage.checkpoint import Piece
from kumi.train.prepare_data import tokenizer_folder
from kumi.train.warmup import warmup_meta


@dataclass
class TrainState:
    """The only thing in kumi that changes: updates done, and tokens trained on.

    `saved` is the step of the last checkpoint that was begun or restored; None before any.
    """

    step: int = 0
    tokens: int = 0
    scale: LossScale = field(default_factory=LossScale)
    saved: int | None = None


@dataclass(frozen=True)
class Parts:
    """What one rank trains with. `validation` is None when nothing is held out. `probe_ids` (3, S) are the tokens on
    which the exported model is compared with the trained one, equal on all ranks."""

    run: ResolvedRun
    mesh: Mesh
    model: nn.Module
    optimizer: Optimizer
    data: BatchSource
    validation: Sweep | None
    store: Store
    probe_ids: npt.NDArray[np.int64]

    @property
    def objective(self) -> Objective:
        """What the run learns."""
        return OBJECTIVES[self.run.config.objective.kind]


def pieces(parts: Parts) -> list[Piece]:
    """The part of the model and the optimizer that this rank saves: what is frozen is where it came from."""
    model = model_pieces(parts.model, parts.mesh)
    if parts.run.model.lora is not None:
        model = [piece for piece in model if is_adapter(piece.name)]
    every = [*model, *optimizer_pieces(parts.model, parts.optimizer, parts.mesh)]
    return owned(every, parts.model, parts.mesh, parts.run.optim)


def meta(state: TrainState, parts: Parts) -> dict[str, Any]:
    """What a checkpoint says besides its tensors: all that is needed to go on, and to export the model."""
    run = parts.run
    return {
        "kumi": __version__,
        "run": run.config.name,
        "step": state.step,
        "tokens": state.tokens,
        **parts.data.state(state.step),
        **warmup_meta(run),
        "loss_scale": state.scale.scale,
        "loss_scale_good_steps": state.scale.good_steps,
        "skipped_updates": state.scale.skipped,
        "skipped_in_a_row": state.scale.in_a_row,
        "data": parts.store.content,
        "model": model_digest(run.model),
        "optimizer": run.optim.kind,
        "layout": spelled(run.layout),
        "run_digest": run.digest,
        **computed_by(run),
        "hf_config": run.hf_config,
        "origin": origin(run).plain(),
        "carried_from": carried_from(run),
        "tokenizer": str(tokenizer_folder(run).resolve()),
        **base_of(run),
    }


def computed_by(run: ResolvedRun) -> dict[str, str]:
    """The CPU, the number format, and how it computes; nothing on other devices."""
    if run.cluster.device.kind != "cpu":
        return {}
    return {"cpu": cpu_name(), "compute": run.precision.compute, "numerics": str(run.numerics or REFERENCE)}


def base_of(run: ResolvedRun) -> dict[str, Any]:
    """Where the frozen model is beside which adapters are trained, its digest, and what they are; else nothing."""
    if run.model.lora is None or run.source is None:
        return {}
    return {"lora": asdict(run.model.lora), "base": str(run.source.resolve()), "base_digest": digest(run.source)}


def carried_from(run: ResolvedRun) -> str | None:
    """The folder of what the model of `run` carries along; None where there is nothing."""
    if run.source is None or run.config.model.init != "pretrained" or not run.model.weights.carried:
        return None
    return str(run.source.resolve())


def origin(run: ResolvedRun) -> Origin:
    """What the model of `run` was made of; nothing that is known where it began from random weights."""
    if run.source is None or run.config.model.init != "pretrained":
        return UNKNOWN
    found = run.snapshots.get("model.source")
    base = origin_of(run.source) if found is None else origin_of(run.source, found.name, found.commit)
    trained_on, license = run.config.export.datasets, run.config.export.license
    return replace(
        base, relation="finetune", datasets=trained_on, license={"license": license} if license else base.license
    )
