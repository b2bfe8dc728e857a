"""One update: the forward and backward of every microbatch, one gradient norm, one step of the optimizer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kumi.data import Batch
from kumi.launch.signals import EXIT_CODES
from kumi.objectives import IGNORED
from kumi.parallel.data_parallel import bare
from kumi.parallel.grad_norm import LossScale, clip_gradients
from kumi.parallel.lora import begin_step
from kumi.parallel.mesh import Mesh, counts_once, total
from kumi.parallel.optim.optimizer import forget_gradients
from kumi.parallel.pipeline_trace import gather, start
from kumi.parallel.run_microbatches import forward_backward
from kumi.train import expert_balance
from kumi.train.expert_balance import Balanced
from kumi.train.pipeline_timeline import write_timeline
from kumi.train.train_state import Parts, TrainState


@dataclass(frozen=True)
class StepResult:
    """Figures of one update. `loss`, the mean over the step's tokens, and `grad_norm` are tensors: nothing waits.

    `scale`: the loss scale after the step, of a float16 run.
    """

    step: int
    loss: Tensor
    grad_norm: Tensor
    lr: float
    tokens: int
    data_s: float
    experts: Balanced | None = None
    scale: LossScale | None = None


def to_device(batch: Batch, device: torch.device) -> dict[str, Tensor]:
    """Return the columns of `batch` as tensors on `device`."""
    return {name: torch.from_numpy(array).to(device, non_blocking=True) for name, array in batch.items()}


def train_step(
    parts: Parts, state: TrainState, counts: StepCounts, before_update: Callable[[], None] | None
) -> StepResult:
    """Train on the step's sequences and advance `state`. `before_update` is called once all gradients are there."""
    run, mesh = parts.run, parts.mesh
    scale = state.scale.scale if run.precision.loss_scaling else 1.0
    expert_balance.begin(parts.model, run, scale)
    begin_step(bare(parts.model), run.config.train.seed, state.step)
    record = start(mesh) if state.step + 1 == run.config.train.trace_step else None
    microbatches = (to_device(one, mesh.device) for one in _microbatches(counts.batch, run.layout.microbatch))
    # The head may form its gradient in the forward pass, so the loss scale must be in it already.
    loss = forward_backward(parts.model, mesh, parts.objective, microbatches, counts.units / scale, record) / scale
    if record is not None:
        write_timeline(gather(record, mesh), run, state.step + 1)
    if before_update is not None:
        before_update()
    norm, lr = _update(parts, state)
    experts = expert_balance.end(parts.model, run, mesh, scale)
    state.step += 1
    state.tokens += counts.tokens
    scaling = state.scale if run.precision.loss_scaling else None
    return StepResult(state.step, total(loss, mesh), norm, lr, counts.tokens, counts.data_s, experts, scaling)


def _update(parts: Parts, state: TrainState) -> tuple[Tensor, float]:
    """Clip, step the optimizer, drop the gradients; the norm before clipping and the learning rate used."""
    run, scaling = parts.run, parts.run.precision.loss_scaling
    scale = state.scale.scale if scaling else 1.0
    norm = clip_gradients(parts.model, run.optim.grad_clip, parts.mesh, loss_scale=scale)
    lr = run.optim.lr_at(state.step, run.config.train.steps)
    for group in parts.optimizer.param_groups:
        group["lr"] = lr
    # A float16 gradient that overflowed is no gradient: that update is left out, and the scale comes down.
    if not scaling or bool(torch.isfinite(norm)):
        parts.optimizer.step()
    if scaling:
        state.scale = state.scale.after(norm)
    forget_gradients(parts.model, parts.optimizer)
    return norm, lr


@dataclass(frozen=True)
class StepCounts:
    """This rank's sequences of a step, what the objective counts in those of all ranks, their trained tokens, and
    whether a rank was asked to stop."""

    batch: Batch
    units: int
    tokens: int
    signal: int | None
    data_s: float


def read_step(parts: Parts, state: TrainState, signal: int | None) -> StepCounts:
    """The next step's sequences, and what all ranks agree on. `signal` is the one this rank was sent, if any."""
    started = time.perf_counter()
    batch = parts.data.at(state.step)
    data_s = time.perf_counter() - started
    trained = int(np.count_nonzero(batch["labels"] != IGNORED))
    units, tokens, signal = _agree(parts.objective.count(batch), trained, signal, parts.mesh)
    return StepCounts(batch, units, tokens, signal, data_s)


def _agree(units: int, tokens: int, signal: int | None, mesh: Mesh) -> tuple[int, int, int | None]:
    """One reduction: the sums of `units` and `tokens` over all sequences, and a signal that any rank was sent, the same
    on all."""
    own = (units, tokens) if counts_once(mesh) else (0, 0)
    counts = total(torch.tensor([*own, *(int(signal == number) for number in EXIT_CODES)], dtype=torch.int64), mesh)
    sent = [int(number) for number, count in zip(EXIT_CODES, counts[2:].tolist(), strict=True) if count]
    return int(counts[0]), int(counts[1]), sent[0] if sent else None


def _microbatches(batch: Batch, size: int) -> Iterator[Batch]:
    for first in range(0, len(batch["input_ids"]), size):
        yield {name: column[first : first + size] for name, column in batch.items()}
