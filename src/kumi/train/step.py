"""One training step: forward and backward of every microbatch, gradient clipping, optimizer update."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kumi.data import Batch
from kumi.errors import NothingTrainedError
from kumi.launch.signals import EXIT_CODES
from kumi.nn.temperature import at_temperature
from kumi.parallel.embedding_noise import begin_noise_step
from kumi.parallel.grad_norm import LossScale, clip_gradients
from kumi.parallel.lora import begin_dropout_step
from kumi.parallel.mesh import Mesh, all_reduce_sum, is_loss_rank
from kumi.parallel.optim.optimizer import clear_grads
from kumi.parallel.pipeline_trace import gather_timeline, start_trace
from kumi.parallel.run_microbatches import MetricSums, forward_backward
from kumi.parallel.stage_modules import unwrap
from kumi.train import expert_balance
from kumi.train.critic import CriticStep, update_critic
from kumi.train.expert_balance import ExpertBalance
from kumi.train.pipeline_timeline import write_pipeline_timeline
from kumi.train.train_state import RankState, TrainState


@dataclass(frozen=True)
class StepResult:
    """Results of one step. Those on the device remain tensors, so that the host does not wait for the device."""

    step: int
    loss: Tensor  # mean over the step's units
    grad_norm: Tensor  # before clipping
    lr: float
    tokens: int  # trained tokens, of all ranks (see `Objective.tokens`)
    data_s: float  # seconds to read or collect the batch
    metrics: Tensor  # (metrics, 2): for each of the objective's metrics the sum and number of its terms, of all ranks
    experts: ExpertBalance | None = None
    scale: LossScale | None = None  # after the step; None unless the run is float16
    rollouts: Mapping[str, float] = field(default_factory=dict)  # metrics of a rollout batch that begins in this step
    critic: CriticStep | None = None  # the update of the critic; None without one


def as_tensors(batch: Batch) -> dict[str, Tensor]:
    """Return the columns of `batch` as tensors that share their memory."""
    return {name: torch.from_numpy(array) for name, array in batch.items()}


def train_step(
    rank_state: RankState, state: TrainState, step_batch: StepBatch, before_update: Callable[[], None] | None
) -> StepResult:
    """Train on `step_batch` and advance `state`. Call `before_update` between the backward pass and the update."""
    run, mesh = rank_state.run, rank_state.mesh
    scale = state.scale.scale if run.precision.loss_scaling else 1.0
    expert_balance.prepare_routers(rank_state.model, run, scale)
    begin_dropout_step(unwrap(rank_state.model), run.config.train.seed, state.step)
    begin_noise_step(rank_state.model, mesh, run.config.train.seed, state.step, len(step_batch.batch["input_ids"]))
    record = start_trace(mesh) if state.step + 1 == run.config.train.trace_step else None
    metrics = MetricSums(rank_state.objective, mesh)
    # The head may compute its gradient in the forward pass, so the token weights must include the loss scale.
    with at_temperature(rank_state.model, 1.0 if run.config.rollout is None else run.config.rollout.temperature):
        loss = (
            forward_backward(
                rank_state.model,
                mesh,
                rank_state.objective,
                _microbatches(step_batch.batch, run.layout.microbatch),
                step_batch.units / scale,
                record,
                metrics,
            )
            / scale
        )
    if record is not None:
        write_pipeline_timeline(gather_timeline(record, mesh), run, state.step + 1)
    if before_update is not None:
        before_update()
    norm, lr = _update(rank_state, state, learns=step_batch.learns)
    experts = expert_balance.balance_experts(rank_state.model, run, mesh, scale)
    critic = _update_critic(rank_state, state, step_batch, scale)
    if run.precision.loss_scaling:
        # The sum of both norms is finite only if both are: policy and critic share the scale.
        state.scale = state.scale.after(norm if critic is None else norm + critic.grad_norm)
    state.step += 1
    state.tokens += step_batch.tokens
    scaling = state.scale if run.precision.loss_scaling else None
    sums = all_reduce_sum(torch.cat([loss.reshape(1), metrics.sums.flatten().to(loss.dtype)]), mesh)
    measured = sums[1:].view(-1, 2)
    rest = (step_batch.tokens, step_batch.data_s, measured, experts, scaling, step_batch.rollouts)
    return StepResult(state.step, sums[0], norm, lr, *rest, critic)


def _update_critic(rank_state: RankState, state: TrainState, step_batch: StepBatch, scale: float) -> CriticStep | None:
    """Train the critic on the rows of the step; return None without one, or if no token of the step has a return."""
    critic, run = rank_state.critic, rank_state.run
    if critic is None or not step_batch.returns:
        return None
    microbatches = _microbatches(step_batch.batch, run.layout.microbatch)
    return update_critic(critic, run, rank_state.mesh, microbatches, state.step, step_batch.returns, scale)


def _update(rank_state: RankState, state: TrainState, *, learns: bool) -> tuple[Tensor, float]:
    """Clip the gradients, update the weights, free the gradients. Return the unclipped norm and the learning rate.

    If not `learns`, leave the weights as they are: momentum and weight decay would change them without gradients, too.
    """
    run, scaling = rank_state.run, rank_state.run.precision.loss_scaling
    scale = state.scale.scale if scaling else 1.0
    norm = clip_gradients(rank_state.model, run.optim.grad_clip, rank_state.mesh, loss_scale=scale)
    lr = run.optim.lr_at(state.step, run.steps)
    for group in rank_state.optimizer.param_groups:
        group["lr"] = lr
    # A float16 gradient that overflowed is useless: skip the update and lower the loss scale.
    if learns and (not scaling or bool(torch.isfinite(norm))):
        rank_state.optimizer.step()
    clear_grads(rank_state.model, rank_state.optimizer)
    return norm, lr


@dataclass(frozen=True)
class StepBatch:
    """This rank's sequences of a step, and numbers that are the same on all ranks."""

    batch: Batch
    units: float  # units in the sequences of all ranks; the loss is a mean over units (see kumi.objectives)
    tokens: int  # trained tokens in the sequences of all ranks
    signal: int | None  # a stop signal that any rank received
    data_s: float  # seconds to read or collect the batch
    learns: bool = True  # False if all advantages of a step of reinforcement learning are 0
    rollouts: Mapping[str, float] = field(default_factory=dict)  # metrics of a rollout batch that begins in this step
    returns: int = 0  # tokens in the sequences of all ranks with a return, from which a critic learns


def read_step(rank_state: RankState, state: TrainState, signal: int | None) -> StepBatch:
    """Read the next step's sequences, and all-reduce the counts and the signal.

    `signal`: a stop signal that this rank received. Raise NothingTrainedError, on all ranks, if no sequence of
    any rank has a token to train: the mean loss of such a step is undefined.
    """
    rollouts = rank_state.rollouts
    if rollouts is not None and rollouts.collects(state.step):
        # Collecting takes long: obey a signal before it.
        _, _, agreed = _agree(0.0, 0, signal, rank_state.mesh)
        if agreed is not None:
            return StepBatch({}, 0.0, 0, agreed, 0.0)
    started = time.perf_counter()
    batch = rank_state.data.at(state.step)
    data_s = time.perf_counter() - started
    objective = rank_state.objective
    units, tokens, signal = _agree(objective.count(batch), objective.tokens(batch), signal, rank_state.mesh)
    if units == 0 and signal is None:
        raise NothingTrainedError(_nothing_trained(rank_state, state.step, tokens))
    if rollouts is None:
        return StepBatch(batch, units, tokens, signal, data_s)
    learns, metrics = rollouts.teaches(state.step), rollouts.metrics(state.step)
    return StepBatch(batch, units, tokens, signal, data_s, learns, metrics, rollouts.count_returns(state.step))


def _agree(units: float, tokens: int, signal: int | None, mesh: Mesh) -> tuple[float, int, int | None]:
    """Return the sums of `units` and `tokens` over all sequences, and a signal that any rank got, by one all-reduce."""
    own = (units, tokens) if is_loss_rank(mesh) else (0, 0)
    counts = all_reduce_sum(
        torch.tensor([*own, *(int(signal == number) for number in EXIT_CODES)], dtype=torch.float64), mesh
    )
    signals = [int(number) for number, count in zip(EXIT_CODES, counts[2:].tolist(), strict=True) if count]
    return float(counts[0]), int(counts[1]), signals[0] if signals else None


def _nothing_trained(rank_state: RankState, step: int, tokens: int) -> str:
    """Return the error message for `step`, counted from 0: `tokens` of its tokens have a label, but it has no units."""
    begin, end = (rank_state.data.state(number).get("sequences") for number in (step, step + 1))
    numbers = "" if begin is None or end is None else f", sequences {begin} to {end - 1} of the data"
    reason = f"the weights of its {tokens} tokens are 0" if tokens else "all its labels are masked"
    return (
        f"step {step + 1}{numbers}: no token is trained, because {reason}; `kumi data show` shows the trained tokens "
        f"of each source: correct its rows or leave it out, or raise batch.tokens_per_step"
    )


def _microbatches(batch: Batch, size: int) -> Iterator[dict[str, Tensor]]:
    """Yield the rows of `batch`, `size` at a time."""
    for first in range(0, len(batch["input_ids"]), size):
        yield as_tensors({name: column[first : first + size] for name, column in batch.items()})
