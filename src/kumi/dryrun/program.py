"""One rank's program, carried out over tensors without content: what it holds, computes and sends in a step.

The same model, schedule, recomputation, communication and optimizer as in training; no weights are drawn, no data read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parallel import DistributedDataParallel

from kumi.dryrun.messages import Message
from kumi.dryrun.stand_in import ring_without_attention, stand_in
from kumi.dryrun.track import Tracker
from kumi.dryrun.world import rank_of
from kumi.objectives import OBJECTIVES
from kumi.parallel import bare, build_optimizer, clip_gradients, tensor
from kumi.parallel.build import assemble, replicated
from kumi.parallel.mesh import Mesh
from kumi.parallel.objective import forward_backward
from kumi.parallel.optim.base import Optimizer
from kumi.parallel.stages import stages_of
from kumi.spec.job import Job
from kumi.spec.layout import Layout
from kumi.spec.schedules import FORWARDS_FIRST, IN_ROUNDS


@dataclass(frozen=True)
class Measured:
    """A step of one rank: bytes of each kind at its fullest moment, FLOPs, and what it sends how often, of which
    `groups` says over which axes of the mesh each group stretches. `microbatches` of the step were carried out."""

    memory: Mapping[str, int]
    flops: float
    messages: Mapping[Message, int]
    groups: Mapping[str, tuple[str, ...]]
    microbatches: int

    @property
    def peak(self) -> int:
        return sum(self.memory.values())


def carry_out(job: Job, layout: Layout, rank: int) -> Measured:
    """What `rank` of `layout` does in a step of `job`.

    A step of many microbatches is not carried out to its end: once the pipeline is full each is like the one before,
    and what one more costs is taken times those that are left.
    """
    with rank_of(layout, rank) as mesh:
        model = assemble(job.model, mesh, job.precision)
        mode, tracker = FakeTensorMode(allow_non_fake_inputs=True), Tracker(fake=True)
        tracker.inside |= ring_without_attention(tracker.flops)
        with mode, tracker.resizing():
            # What was laid out on the meta device becomes fake here, and only that.
            model.to_empty(device=mesh.device)
            mode.allow_non_fake_inputs = False
            tensor.clear_padding(model, mesh)
            with tracker:  # DDP makes its buckets here
                made = replicated(model, mesh, job.precision)
            for stage in stages_of(bare(made)).values():
                stand_in(stage, mesh, job.cluster.device.kind)
            watch_head(made, tracker)
            optimizer = build_optimizer(made, mesh, job.optim)
            hold(made, optimizer, tracker)
            return _measured(made, mesh, job, optimizer, tracker)


def _measured(model: nn.Module, mesh: Mesh, job: Job, optimizer: Optimizer, tracker: Tracker) -> Measured:
    whole = job.batch.microbatches(mesh.layout)
    # DDP chooses its buckets anew after a first step, which takes content.
    some, more = (whole, 0) if isinstance(model, DistributedDataParallel) else enough(mesh.layout, whole)
    seen: list[tuple[Counter[Message], float]] = []
    for count in (some, some + more) if more else (some,):
        tracker.begin()
        step(model, mesh, job, optimizer, tracker, count)
        seen.append((Counter(tracker.messages), float(tracker.flops.total())))
    (messages, flops), (first, less) = seen[-1], seen[0]
    left = (whole - some - more) // more if more else 0
    for message in set(messages) | set(first):
        messages[message] += left * (messages[message] - first[message])
    names = {
        str(group.group_name): tuple(n for n, g in mesh.groups.items() if g is group) for group in mesh.groups.values()
    }
    return Measured(tracker.peak(), flops + left * (flops - less), messages, names, some + more)


def enough(layout: Layout, microbatches: int) -> tuple[int, int]:
    """How many microbatches to carry out at first, and how many more the second time; all at once where a second time
    would not be less."""
    unit = layout.pp if layout.schedule in IN_ROUNDS else 1
    some = 2 * layout.pp * layout.stages if layout.pp > 1 else 2
    some = -(-some // unit) * unit
    if layout.schedule in FORWARDS_FIRST or 2 * some + unit >= microbatches:
        return microbatches, 0
    return some, unit


def watch_head(model: nn.Module, tracker: Tracker) -> None:
    """Makes `tracker` count what the loss makes as the head's."""
    for decoder in stages_of(bare(model)).values():
        decoder.weighted_sum = tracker.within("head", decoder.weighted_sum)  # type: ignore[assignment, arg-type]


def hold(model: nn.Module, optimizer: Optimizer, tracker: Tracker) -> None:
    """Counts what stays from step to step."""
    tracker.hold("params", bare(model).parameters())
    tracker.hold("params", bare(model).buffers())
    tracker.hold("optimizer", (one for state in optimizer.state.values() for one in state.values()))
    tracker.hold("grads", (one.grad for one in bare(model).parameters() if one.grad is not None))


def step(model: nn.Module, mesh: Mesh, job: Job, optimizer: Optimizer, tracker: Tracker, microbatches: int) -> None:
    """A step as `kumi.train.step` makes it, of `microbatches` microbatches whose rows are one document each."""
    shape = (mesh.layout.microbatch, job.batch.seq_len)
    with tracker:
        names = ("input_ids", "labels", "position_ids")
        batches = ({name: torch.zeros(shape, dtype=torch.int64) for name in names} for _ in range(microbatches))
        forward_backward(model, mesh, OBJECTIVES["lm"], batches, job.batch.tokens_per_step)
        hold(model, optimizer, tracker)  # once more: FSDP2 pads its parts at its first use
        clip_gradients(model, job.optim.grad_clip, mesh)
        optimizer.step()
        optimizer.zero_grad()
