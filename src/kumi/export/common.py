"""What every export needs: the words at the head of a file, the launch line, and what all trainers refuse alike."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kumi.spec.job import Job
from kumi.spec.layout import AXES, Layout
from kumi.spec.optim import Optim

# A plan fixes the model, the machines and the step; data and the number of steps belong to a run.
STEPS = 1000

MADE_UP = (
    "Data, tokenizer, checkpoints and the number of steps are not part of a plan: as it stands it trains on made-up "
    "tokens, which measures the step time."
)
OFFLOADS = {
    "optimizer": "optimizer states on the host",
    "states": "all states on the host",
    "activations": "activations on the host",
    "optimizer-nvme": "optimizer states on NVMe",
    "states-nvme": "all states on NVMe",
}


def title(job: Job, layout: Layout, trainer: str) -> str:
    """One line that says what was planned, for the head of a file."""
    degrees = " x ".join(f"{axis} {getattr(layout, axis)}" for axis in (*AXES, "ep") if getattr(layout, axis) > 1)
    return (
        f"{trainer}: {job.model.family}, {job.model.num_hidden_layers} layers of {job.model.hidden_size}, on "
        f"{layout.world_size} x {job.cluster.device.name}; {degrees or 'one device'}, ZeRO-{layout.zero}, "
        f"{job.batch.microbatches(layout)} microbatches of {layout.microbatch} x {job.batch.seq_len} tokens."
    )


def machines(job: Job, layout: Layout) -> tuple[int, int]:
    """How many nodes, and processes on each."""
    per_node = min(job.cluster.devices_per_node, layout.world_size)
    return -(-layout.world_size // per_node), per_node


def torchrun(job: Job, layout: Layout) -> str:
    """The beginning of a launch line: torchrun over the nodes, their number and address left to the environment."""
    nodes, per_node = machines(job, layout)
    if nodes == 1:
        return f"torchrun --standalone --nproc-per-node {per_node}"
    return (
        f'torchrun --nnodes {nodes} --nproc-per-node {per_node} --node-rank "${{NODE_RANK:?}}" '
        f'--master-addr "${{MASTER_ADDR:?}}" --master-port "${{MASTER_PORT:-29500}}"'
    )


def unbalanced(job: Job, layout: Layout) -> Iterator[str]:
    """What does not go up: sequences of a step over data-parallel ranks and microbatches, ranks over nodes."""
    share = layout.dp * layout.microbatch
    if job.batch.tokens_per_step % (job.batch.seq_len * share):
        yield (
            f"tokens_per_step={job.batch.tokens_per_step}: {share} sequences of {job.batch.seq_len} tokens (dp "
            f"{layout.dp} x microbatch {layout.microbatch}) do not divide it; use a multiple of "
            f"{job.batch.seq_len * share}"
        )
    nodes, per_node = machines(job, layout)
    if nodes * per_node != layout.world_size:
        yield (
            f"the layout's {layout.world_size} ranks do not fill nodes of {per_node} devices; "
            f"use a multiple of {per_node}"
        )


def deals_heads(layout: Layout) -> Iterator[str]:
    """Why a layout with Ulysses or tiles cannot be exported."""
    if layout.cp > 1 and layout.context != "ring":
        yield f"context='{layout.context}': exports know the ring only; set context = 'ring'"
    if layout.tiles > 1:
        yield f"tiles={layout.tiles}: exports know no tiles; set tiles = 1"


def only(name: str, value: object, allowed: Iterable[object], trainer: str, why: str) -> Iterator[str]:
    """A sentence when `value` is none of `allowed`: what the trainer does not do, why, and what it does."""
    choices = [str(choice) for choice in allowed]
    if str(value) not in choices:
        listed = choices[0] if len(choices) == 1 else f"{', '.join(choices[:-1])} or {choices[-1]}"
        yield f"{name}={value}: {trainer} {why}; use {listed}"


def reduces_in_half(job: Job) -> bool:
    """Whether the plan has gradients travel in two bytes an element, as its engine or its precision says."""
    return job.precision.compute != "float32" and (
        job.precision.reduce != "float32" or job.engine.grad_reduce_itemsize == 2
    )


def precision(job: Job, trainer: str, computes: Iterable[str]) -> Iterator[str]:
    """What of the job's number formats `trainer`, which computes in `computes` over float32 masters, does not do."""
    choices = tuple(computes)
    yield from only("precision.compute", job.precision.compute, choices, trainer, "does not compute in it")
    yield from only("precision.param", job.precision.param, ["float32"], trainer, "keeps float32 master weights")


def offload(layout: Layout, trainer: str, does: Iterable[str]) -> Iterator[str]:
    """What `trainer`, which moves `does` off the device, does not move."""
    choices = ("none", *does)
    what = OFFLOADS.get(layout.offload, "that")
    yield from only("offload", layout.offload, choices, trainer, f"does not keep {what}")


def floor(optim: Optim) -> float:
    """The learning rate at the last step, without the digits that only rounding made."""
    return float(f"{optim.lr * optim.min_lr_ratio:.12g}")


def optimizer(job: Job, kinds: Iterable[str], trainer: str) -> Iterator[str]:
    """What `trainer`, which has the optimizers `kinds`, lacks."""
    yield from only("optim.kind", job.optim.kind, kinds, trainer, "does not have it")
