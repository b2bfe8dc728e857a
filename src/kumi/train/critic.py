"""The critic (value model) of a run with advantage 'gae': a second model on the policy's layout with its own optimizer.

In every step, it is trained on the rows of the policy after the policy's update, when the policy's gradients are freed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from kumi.config import ResolvedRun
from kumi.objectives.ppo import ValueLoss
from kumi.parallel.grad_norm import clip_gradients
from kumi.parallel.lora import begin_dropout_step
from kumi.parallel.mesh import Mesh, all_reduce_sum
from kumi.parallel.optim import build_optimizer
from kumi.parallel.optim.optimizer import Optimizer, clear_grads
from kumi.parallel.run_microbatches import MetricSums, forward_backward
from kumi.parallel.stage_modules import unwrap
from kumi.parallel.state_tensors import PieceReader, fill_pieces, optimizer_pieces
from kumi.spec.optim import Optim
from kumi.spec.saved_tensors import CRITIC_PREFIX
from kumi.train.expert_balance import balance_experts, prepare_routers
from kumi.train.run_models import build_critic_model


@dataclass(frozen=True)
class Critic:
    """The critic on this rank. optim: the settings of its optimizer."""

    model: nn.Module
    optimizer: Optimizer
    optim: Optim
    objective: ValueLoss


@dataclass(frozen=True)
class CriticStep:
    """Results of one update, which remain tensors on the device.

    loss: the mean over the tokens with a return. grad_norm: before clipping. metrics: for each of `ValueLoss.metrics`,
    the sum and the number of its terms over all ranks, (metrics, 2).
    """

    loss: Tensor
    grad_norm: Tensor
    lr: float
    metrics: Tensor


def build_critic(run: ResolvedRun, mesh: Mesh, folder: Path, saved: PieceReader | None) -> Critic | None:
    """Return the critic of `run`, or None if the run trains no critic.

    folder: where optimizer states are that a layout offloads to drives.
    saved: the tensors of a checkpoint; None for a critic before its first step.
    """
    if run.job.critic is None:
        return None
    read = None if saved is None else _critic_reader(saved)
    model, optim = build_critic_model(run, mesh, read), run.critic_optim
    optimizer = build_optimizer(model, mesh, optim, folder)
    if read is not None:
        fill_pieces(optimizer_pieces(model, optimizer, mesh), read)
    return Critic(model, optimizer, optim, ValueLoss(run.config.critic.value_clip or None))


def _critic_reader(saved: PieceReader) -> PieceReader:
    """Return a reader of the critic's tensors by their names in its model: a checkpoint stores them with a prefix."""
    return lambda name, start, shape: saved(CRITIC_PREFIX + name, start, shape)


def update_critic(
    critic: Critic,
    run: ResolvedRun,
    mesh: Mesh,
    microbatches: Iterable[Mapping[str, Tensor]],
    step: int,
    returns: int,
    scale: float,
) -> CriticStep:
    """Train the critic on `microbatches` of this data-parallel rank, in update `step` (0-based).

    returns: tokens with a return in the step, over all ranks; at least 1. scale: the loss scale of float16, else 1.
    """
    prepare_routers(critic.model, run, scale)
    begin_dropout_step(unwrap(critic.model), run.config.train.seed, step)
    metrics = MetricSums(critic.objective, mesh)
    loss = (
        forward_backward(critic.model, mesh, critic.objective, microbatches, returns / scale, metrics=metrics) / scale
    )
    norm = clip_gradients(critic.model, critic.optim.grad_clip, mesh, loss_scale=scale)
    lr = critic.optim.lr_at(step, run.steps)
    for group in critic.optimizer.param_groups:
        group["lr"] = lr
    # A float16 gradient that overflowed is useless, as for the policy.
    if not run.precision.loss_scaling or bool(torch.isfinite(norm)):
        critic.optimizer.step()
    clear_grads(critic.model, critic.optimizer)
    balance_experts(critic.model, run, mesh, scale)
    sums = all_reduce_sum(torch.cat([loss.reshape(1).double(), metrics.sums.flatten()]), mesh)
    return CriticStep(sums[0], norm, lr, sums[1:].view(-1, 2))
