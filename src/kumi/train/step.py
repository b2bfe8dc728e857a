"""One update: the forward and backward of every microbatch, one gradient norm, one step of the optimizer."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kumi.data import Batch
from kumi.launch.signals import EXIT_CODES
from kumi.objectives import lm
from kumi.parallel import context, pipeline
from kumi.parallel.data import bare
from kumi.parallel.grads import LossScale, clip_gradients
from kumi.parallel.lora import begin_step
from kumi.parallel.mesh import Mesh, counts_once, total
from kumi.parallel.optimizer import forget_gradients
from kumi.parallel.record import gather, start
from kumi.train import balance
from kumi.train.balance import Balanced
from kumi.train.state import Parts, TrainState
from kumi.train.timeline import write_timeline


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
    """The arrays of `batch` as tensors on `device`, by the decoder's argument names."""
    arrays = {
        "input_ids": batch.input_ids,
        "labels": batch.labels,
        "position_ids": batch.position_ids,
        "document_ids": batch.document_ids,
    }
    return {name: torch.from_numpy(array).to(device, non_blocking=True) for name, array in arrays.items()}


def train_step(
    parts: Parts, state: TrainState, counts: StepCounts, before_update: Callable[[], None] | None
) -> StepResult:
    """Train on the step's sequences and advance `state`. `before_update` is called once all gradients are there."""
    run, mesh = parts.run, parts.mesh
    scale = state.scale.scale if run.precision.loss_scaling else 1.0
    balance.begin(parts.model, run, scale)
    begin_step(bare(parts.model), run.config.train.seed, state.step)
    # The head forms its gradient in the forward pass, so the loss scale must be in the weights already.
    whole = [to_device(microbatch, mesh.device) for microbatch in _cut(counts.batch, run.layout.microbatch)]
    microbatches = [context.cut(microbatch, mesh) for microbatch in whole]
    for inputs in microbatches:
        inputs["token_weights"] = lm.token_weights(inputs["labels"], counts.tokens / scale)
    record = start(mesh) if state.step + 1 == run.config.train.trace_step else None
    loss = pipeline.train(parts.model, mesh, microbatches, record) / scale
    if record is not None:
        write_timeline(gather(record, mesh), run, state.step + 1)
    if before_update is not None:
        before_update()
    norm, lr = _update(parts, state)
    experts = balance.end(parts.model, run, mesh, scale)
    state.step += 1
    state.tokens += counts.tokens
    state.sequences += run.batch.sequences
    if mesh.index("tp") > 0:  # every rank of a tensor-parallel group has the same loss
        loss.zero_()
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
    """This rank's sequences of a step, the trained tokens of all ranks, and whether a rank was asked to stop."""

    batch: Batch
    tokens: int
    signal: int | None
    data_s: float


def read_step(parts: Parts, state: TrainState, signal: int | None) -> StepCounts:
    """The next step's sequences, and what all ranks agree on. `signal` is the one this rank was sent, if any."""
    started = time.perf_counter()
    share = parts.run.batch.sequences // parts.run.layout.dp
    first = state.sequences + parts.run.layout.dp_index(parts.mesh.rank) * share
    batch = parts.data.batch(first, share)
    data_s = time.perf_counter() - started
    trained = int(np.count_nonzero(batch.labels != lm.IGNORED))
    tokens, signal = _agree(trained, signal, parts.mesh)
    return StepCounts(batch, tokens, signal, data_s)


def _agree(tokens: int, signal: int | None, mesh: Mesh) -> tuple[int, int | None]:
    """One reduction: the sum of `tokens` over all sequences, and a signal that any rank was sent, the same on all."""
    own = tokens if counts_once(mesh) else 0
    counts = total(torch.tensor([own, *(int(signal == number) for number in EXIT_CODES)], dtype=torch.int64), mesh)
    sent = [int(number) for number, count in zip(EXIT_CODES, counts[1:].tolist(), strict=True) if count]
    return int(counts[0]), sent[0] if sent else None


def _cut(batch: Batch, size: int) -> list[Batch]:
    arrays = (batch.input_ids, batch.labels, batch.position_ids, batch.document_ids)
    starts = range(0, len(batch.input_ids), size)
    return [Batch(*(array[start : start + size] for array in arrays)) for start in starts]
