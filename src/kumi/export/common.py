"""Helpers of all exports: the text at the head of a file, the launch command, and limits that all trainers share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kumi.spec.job import Job
from kumi.spec.layout import AXES, Layout
from kumi.spec.optim import Optim

# The number of steps if the run file has none. It is a key of a run, not of a plan.
DEFAULT_STEPS = 1000

SYNTHETIC_DATA = (
    "Data, tokenizer, checkpoints and the number of steps are not part of a plan: as it is, this file trains on "
    "synthetic tokens, to measure the step time."
)
# `Layout.offload` -> what is kept where, as a part of an error message.
_OFFLOADS = {
    "optimizer": "optimizer states on the host",
    "states": "all states on the host",
    "activations": "activations on the host",
    "optimizer-nvme": "optimizer states on NVMe",
    "states-nvme": "all states on NVMe",
}


def plan_title(job: Job, layout: Layout, trainer: str) -> str:
    """Return one line that describes the plan, for the head of a file."""
    degrees = " x ".join(f"{axis} {getattr(layout, axis)}" for axis in (*AXES, "ep") if getattr(layout, axis) > 1)
    return (
        f"{trainer}: {job.model.family}, {job.model.num_hidden_layers} layers of {job.model.hidden_size}, on "
        f"{layout.world_size} x {job.cluster.device.name}; {degrees or 'one device'}, ZeRO-{layout.zero}, "
        f"{job.batch.microbatches(layout)} microbatches of {layout.microbatch} x {job.batch.seq_len} tokens."
    )


def nodes_and_devices(job: Job, layout: Layout) -> tuple[int, int]:
    """Return the number of nodes and of processes per node."""
    per_node = min(job.cluster.devices_per_node, layout.world_size)
    return -(-layout.world_size // per_node), per_node


def torchrun_command(job: Job, layout: Layout) -> str:
    """Return the torchrun part of a launch command; environment variables give the node's rank and the address."""
    nodes, per_node = nodes_and_devices(job, layout)
    if nodes == 1:
        return f"torchrun --standalone --nproc-per-node {per_node}"
    return (
        f'torchrun --nnodes {nodes} --nproc-per-node {per_node} --node-rank "${{NODE_RANK:?}}" '
        f'--master-addr "${{MASTER_ADDR:?}}" --master-port "${{MASTER_PORT:-29500}}"'
    )


# Each of the functions unsupported_... yields the reasons why a trainer does not support the job or the layout. So do
# the functions _unsupported_... in the modules of the exports.


def unsupported_sizes(job: Job, layout: Layout) -> Iterator[str]:
    """Check that a step is a whole number of microbatches on every rank, and that the ranks fill the nodes."""
    sequences = layout.dp * layout.microbatch
    if job.batch.tokens_per_step % (job.batch.seq_len * sequences):
        yield (
            f"tokens_per_step={job.batch.tokens_per_step}: {sequences} sequences of {job.batch.seq_len} tokens (dp "
            f"{layout.dp} x microbatch {layout.microbatch}) do not divide it; use a multiple of "
            f"{job.batch.seq_len * sequences}"
        )
    nodes, per_node = nodes_and_devices(job, layout)
    if nodes * per_node != layout.world_size:
        yield (
            f"the layout's {layout.world_size} ranks do not fill nodes of {per_node} devices; "
            f"use a multiple of {per_node}"
        )


def unsupported_by_every_export(layout: Layout) -> Iterator[str]:
    """Check for Ulysses and tiles, which kumi exports to no trainer."""
    if layout.cp > 1 and layout.context != "ring":
        yield f"context='{layout.context}': exports support ring attention only; set context = 'ring'"
    if layout.tiles > 1:
        yield f"tiles={layout.tiles}: exports do not support tiles; set tiles = 1"


def unsupported_head(job: Job) -> Iterator[str]:
    """Check for a score head, for which kumi exports to no trainer."""
    if job.model.head == "score":
        yield "objective.kind='reward': exports train the next token only; set objective.kind='lm', or train with kumi"


def unsupported_value(name: str, value: object, supported: Iterable[object], trainer: str, why: str) -> Iterator[str]:
    """Yield a sentence if `value` is not in `supported`, with the reason `why` and the supported values."""
    choices = [str(choice) for choice in supported]
    if str(value) not in choices:
        listed = choices[0] if len(choices) == 1 else f"{', '.join(choices[:-1])} or {choices[-1]}"
        yield f"{name}={value}: {trainer} {why}; use {listed}"


def unsupported_precision(job: Job, trainer: str, computes: Iterable[str]) -> Iterator[str]:
    """Check the precision for a trainer that computes in the dtypes `computes`, with float32 master weights."""
    choices, precision = tuple(computes), job.precision
    yield from unsupported_value("precision.compute", precision.compute, choices, trainer, "does not compute in it")
    yield from unsupported_value("precision.param", precision.param, ["float32"], trainer, "has float32 master weights")


def unsupported_offload(layout: Layout, trainer: str, kinds: Iterable[str]) -> Iterator[str]:
    """Check the offloading for a trainer that supports `kinds`."""
    why = f"does not keep {_OFFLOADS.get(layout.offload, layout.offload)}"
    yield from unsupported_value("offload", layout.offload, ("none", *kinds), trainer, why)


def unsupported_optimizer(job: Job, kinds: Iterable[str], trainer: str) -> Iterator[str]:
    """Check the optimizer for a trainer that has `kinds`."""
    yield from unsupported_value("optim.kind", job.optim.kind, kinds, trainer, "does not have it")


def reduces_in_16_bits(job: Job) -> bool:
    """Return True if the plan reduces gradients in two bytes per element, by its precision or its engine (trainer)."""
    return job.precision.compute != "float32" and (
        job.precision.reduce != "float32" or job.engine.grad_reduce_itemsize == 2
    )


def min_learning_rate(optim: Optim) -> float:
    """Return the learning rate of the last step, to 12 significant digits."""
    return float(f"{optim.lr * optim.min_lr_ratio:.12g}")
