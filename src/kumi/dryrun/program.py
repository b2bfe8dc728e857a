"""Run one rank's training step on fake tensors, and measure its memory, FLOPs and messages.

Model, schedule, recomputation, communication and optimizer are those of training. No weights are initialized and no
data is read. In a run with rollouts, the step is an update of the policy, with its reference and its critic in memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parallel import DistributedDataParallel

from kumi.dryrun.fake_kernels import ring_without_attention, use_fake_kernels
from kumi.dryrun.fake_world import fake_rank
from kumi.dryrun.observed_messages import Message
from kumi.dryrun.track import Tracker
from kumi.nn.decoder import Decoder
from kumi.nn.nf4 import packed_matrices
from kumi.objectives import OBJECTIVES, Objective, SegmentSums
from kumi.parallel import build_optimizer, clip_gradients, tensor_parallel, unwrap
from kumi.parallel.build import assemble, with_ddp
from kumi.parallel.mesh import Mesh
from kumi.parallel.optim.optimizer import Optimizer
from kumi.parallel.run_microbatches import forward_backward
from kumi.parallel.stage_modules import Stages, stages_of
from kumi.spec.job import Job
from kumi.spec.layout import Layout
from kumi.spec.model import ModelSpec
from kumi.spec.schedules import FORWARDS_FIRST, IN_ROUNDS


@dataclass(frozen=True)
class Measured:
    """Measurements of one rank's step.

    `memory`: bytes by kind at the peak.
    `flops`: FLOPs.
    `messages`: how often each message is sent.
    `groups`: name of a process group -> names of the mesh's groups with the same ranks.
    `microbatches`: microbatches that were run; the rest of the step is extrapolated.
    """

    memory: Mapping[str, int]
    flops: float
    messages: Mapping[Message, int]
    groups: Mapping[str, tuple[str, ...]]
    microbatches: int

    @property
    def peak(self) -> int:
        """The bytes of all kinds together at the peak."""
        return sum(self.memory.values())


class _MeanOutput(Objective):
    """The mean of the head's results. It stands for all losses from log-probs or scores, which cost about the same."""

    def count(self, batch: Mapping[str, Any]) -> float:
        return int(batch["labels"].numel())

    def loss(self, log_probs: Tensor, batch: Mapping[str, Tensor], units: float, sums: SegmentSums) -> Tensor:
        return log_probs.sum() / units


def dry_step(job: Job, layout: Layout, rank: int) -> Measured:
    """Measure the step of `rank` of `layout`.

    Of a step with many microbatches, only the first are run: once the pipeline is full, all microbatches cost the same.
    A second run has one more round of microbatches: pp of them if the schedule takes them in groups of pp, else one.
    The difference of the two runs gives the FLOPs and messages of the remaining rounds.
    """
    with fake_rank(layout, rank) as mesh:
        model = assemble(job.model, mesh, job.precision)
        others = {kind: assemble(spec, mesh, job.precision) for kind, spec in _others(job).items()}
        mode, tracker = FakeTensorMode(allow_non_fake_inputs=True), Tracker(fake=True)
        tracker.inside |= ring_without_attention(tracker.flops)
        with mode, tracker.resizing():
            # to_empty turns the tensors on the meta device, and only those, into fake tensors.
            for each in (model, *others.values()):
                each.to_empty(device=mesh.device)
            mode.allow_non_fake_inputs = False
            tensor_parallel.zero_vocab_padding(model, mesh)
            with tracker:  # DDP allocates its buckets here
                wrapped = with_ddp(model, mesh, job.precision)
            for stage in stages_of(unwrap(wrapped)).values():
                use_fake_kernels(stage, mesh, job.cluster.device.kind)
            track_head(wrapped, tracker)
            track_unpacked(wrapped, tracker)
            optimizer = build_optimizer(wrapped, mesh, job.optim)
            track_states(wrapped, optimizer, tracker)
            other_models = [_track_other(kind, other, job, mesh, tracker) for kind, other in others.items()]
            measured = _measure(wrapped, mesh, job, optimizer, tracker)
            del other_models  # in memory until here
            return measured


def _others(job: Job) -> dict[str, ModelSpec]:
    """Return the models beside the policy that are in memory during an update of `job`, by kind."""
    others = {} if job.critic is None else {"critic": job.critic}
    return others if job.rollout is None or not job.rollout.reference else others | {"reference": job.model}


def _track_other(
    kind: str, model: Decoder | Stages, job: Job, mesh: Mesh, tracker: Tracker
) -> tuple[nn.Module, Optimizer | None]:
    """Return `model` as training has it in memory, and a critic's optimizer; `tracker` counts all of it as `kind`."""
    states: list[Tensor] = [*model.parameters(), *model.buffers()]
    if kind == "reference":
        tracker.track(kind, states)
        return model, None
    with tracker, tracker.of(kind):
        wrapped = with_ddp(model, mesh, job.precision)
    optimizer = build_optimizer(wrapped, mesh, job.optim)
    tracker.track(kind, [*states, *(tensor for state in optimizer.state.values() for tensor in state.values())])
    return wrapped, optimizer


def _measure(model: nn.Module, mesh: Mesh, job: Job, optimizer: Optimizer, tracker: Tracker) -> Measured:
    """Run one or two steps of few microbatches, and extrapolate FLOPs and messages to a step of `job`."""
    total = job.batch.microbatches(mesh.layout)
    # DDP rebuilds its buckets after the first step, which needs real tensors: run all microbatches in one step.
    first, more = (total, 0) if isinstance(model, DistributedDataParallel) else microbatches_to_run(mesh.layout, total)
    runs: list[tuple[Counter[Message], float]] = []
    for count in (first, first + more) if more else (first,):
        tracker.begin()
        run_step(model, mesh, job, optimizer, tracker, count)
        runs.append((Counter(tracker.messages), float(tracker.flops.total())))
    (messages, flops), (messages_before, flops_before) = runs[-1], runs[0]
    repeats = (total - first - more) // more if more else 0
    for message in set(messages) | set(messages_before):
        messages[message] += repeats * (messages[message] - messages_before[message])
    names = {
        str(group.group_name): tuple(n for n, g in mesh.groups.items() if g is group) for group in mesh.groups.values()
    }
    return Measured(tracker.peak(), flops + repeats * (flops - flops_before), messages, names, first + more)


def microbatches_to_run(layout: Layout, microbatches: int) -> tuple[int, int]:
    """Return the microbatches of a first run, and how many more a second run has.

    The second number is 0 if one run of all microbatches is cheaper, or if the memory grows with their number.
    """
    round_size = layout.pp if layout.schedule in IN_ROUNDS else 1
    first = 2 * layout.pp * layout.stages if layout.pp > 1 else 2
    first = -(-first // round_size) * round_size
    if layout.schedule in FORWARDS_FIRST or 2 * first + round_size >= microbatches:
        return microbatches, 0
    return first, round_size


def track_head(model: nn.Module, tracker: Tracker) -> None:
    """Make `tracker` count the tensors of the loss as kind "head"."""
    for decoder in stages_of(unwrap(model)).values():
        decoder.weighted_sum = tracker.within("head", decoder.weighted_sum)  # type: ignore[assignment, arg-type]
        decoder.log_probs = tracker.within("head", decoder.log_probs)  # type: ignore[assignment, arg-type]
        decoder.scores = tracker.within("head", decoder.scores)  # type: ignore[assignment, arg-type]


def track_unpacked(model: nn.Module, tracker: Tracker) -> None:
    """Make `tracker` count NF4 matrices that a layer has unpacked as kind "weights"."""
    for packed in packed_matrices(unwrap(model)).values():
        packed.unpack = tracker.within("weights", packed.unpack)


def track_states(model: nn.Module, optimizer: Optimizer, tracker: Tracker) -> None:
    """Make `tracker` count parameters, buffers, optimizer states and gradients."""
    tracker.track("params", unwrap(model).parameters())
    tracker.track("params", unwrap(model).buffers())
    tracker.track("optimizer", (tensor for state in optimizer.state.values() for tensor in state.values()))
    tracker.track("grads", (param.grad for param in unwrap(model).parameters() if param.grad is not None))


def run_step(model: nn.Module, mesh: Mesh, job: Job, optimizer: Optimizer, tracker: Tracker, microbatches: int) -> None:
    """Run a step as `kumi.train.step` does, of `microbatches` microbatches with one document per sequence.

    Passes of the loss without a gradient are left out: they need less memory.
    """
    shape = (mesh.layout.microbatch, job.batch.seq_len)
    with tracker:
        names = ("input_ids", "labels", "position_ids")
        batches = ({name: torch.zeros(shape, dtype=torch.int64) for name in names} for _ in range(microbatches))
        is_nonlinear = job.passes.head_again or job.model.head == "score"
        objective = _MeanOutput() if is_nonlinear else OBJECTIVES["lm"]()
        # Fake labels have no values that tell which positions are trained, so the head computes all positions.
        forward_backward(
            model, mesh, objective, batches, job.batch.tokens_per_step, label_positions=lambda labels: None
        )
        track_states(model, optimizer, tracker)  # again, because FSDP2 pads its shards at their first use
        clip_gradients(model, job.optim.grad_clip, mesh)
        optimizer.step()
        optimizer.zero_grad()
