"""Standard layouts that guides recommend (DDP, FSDP, DeepSpeed, Megatron-LM, ...), for comparison with the plan.

Degrees and microbatches follow the guides' rules.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from kumi.plan.estimate import estimate, estimate_many
from kumi.plan.memory.device_memory import usable_memory
from kumi.plan.report import StandardLayout
from kumi.spec.batch import BatchSpec
from kumi.spec.checks import illegal
from kumi.spec.divisibility import divisors
from kumi.spec.job import Job
from kumi.spec.layout import RECOMPUTE, Layout
from kumi.spec.ledger import num_params, unique_layer_ops
from kumi.spec.sharding import DIM_TO_AXIS

# Matmuls of more tokens than this take no less time per token; a larger microbatch only takes memory.
_MICROBATCH_TOKENS = 32768
# Megatron-LM users size TP x PP so that the states fill this share of a device: 6 bytes per parameter, and 12 more that
# ZeRO-1 shards.
_STATES_SHARE = 0.6


def standard_layouts(job: Job) -> list[tuple[str, Layout]]:
    """Return (title, layout) of the standard layouts for the job's machines, whether they are legal and fit or not."""
    layouts = _one_device(job) if job.cluster.devices == 1 else _many_devices(job)
    return [(title, replace(layout, microbatch=_microbatch(job.batch, layout))) for title, layout in layouts]


def _one_device(job: Job) -> list[tuple[str, Layout]]:
    """Return (title, layout) without and with offloading to the host and to NVMe, where the cluster has their speed."""
    host, layouts = job.cluster.host, [("No offload (all states on the device)", Layout())]
    if host.device_bandwidth:
        layouts.append(("ZeRO-Offload (optimizer states on the host)", Layout(offload="optimizer")))
        layouts.append(("ZeRO-Offload (all states on the host)", Layout(offload="states")))
    if host.device_bandwidth and host.nvme and host.nvme_bandwidth:
        layouts.append(("ZeRO-Infinity (all states on NVMe)", Layout(offload="states-nvme")))
    return layouts


def _many_devices(job: Job) -> list[tuple[str, Layout]]:
    """Return (title, layout) of data parallelism, ZeRO, tensor parallelism, Megatron-LM and offloading."""
    devices, node = job.cluster.devices, job.cluster.devices_per_node
    layouts = [
        ("DDP (a full replica per device)", Layout(dp_replicate=devices)),
        ("DeepSpeed ZeRO-2 over all devices", Layout(dp_shard=devices, zero=2)),
        ("FSDP (ZeRO-3) over all devices", Layout(dp_shard=devices, zero=3)),
    ]
    if 1 < node < devices:
        hsdp = Layout(dp_replicate=devices // node, dp_shard=node, zero=3)
        layouts.append(("HSDP (shard in nodes, replicate across)", hsdp))
    tp = _largest_tp(job)
    if tp > 1:
        rest = devices // tp
        layout = Layout(tp=tp, dp_shard=rest, zero=3 if rest > 1 else 0)
        layouts.append(("TP in nodes, FSDP across" if rest > 1 else "TP over the node", layout))
    layouts.append(("Megatron-LM (TP x PP, ZeRO-1)", _megatron(job)))
    if job.cluster.host.device_bandwidth:
        offloaded = Layout(dp_shard=devices, zero=3, offload="states")
        layouts.append(("DeepSpeed ZeRO-3 (states on the host)", offloaded))
    return layouts


def _largest_tp(job: Job) -> int:
    """Return the largest tp inside a node that divides every dimension that tensor parallelism shards."""
    ops = (op for kind in unique_layer_ops(job.model) for op in kind)
    counts = {dim.count for op in ops for dim in (op.source, op.target) if DIM_TO_AXIS.get(dim.name) == "tp"}
    return max(size for size in divisors(job.cluster.devices_per_node) if all(count % size == 0 for count in counts))


def _megatron(job: Job) -> Layout:
    """Return the smallest tp x pp whose states fill at most `_STATES_SHARE` of a device.

    tp grows to the size of a node before pp does. If no degrees suffice, they are the largest.
    """
    devices, memory = job.cluster.devices, job.cluster.device.memory
    model_axes = [(tp, 1) for tp in divisors(_largest_tp(job))]
    model_axes += [
        (_largest_tp(job), pp) for pp in divisors(devices // _largest_tp(job)) if 1 < pp <= job.model.num_hidden_layers
    ]
    for tp, pp in model_axes:
        rest = devices // (tp * pp)
        if num_params(job.model) / (tp * pp) * (6 + 12 / rest) <= _STATES_SHARE * memory:
            break
    return Layout(tp=tp, pp=pp, dp_shard=rest, zero=1 if rest > 1 else 0)


def _microbatch(batch: BatchSpec, layout: Layout) -> int:
    """Return the largest divisor of a rank's sequences with at most `_MICROBATCH_TOKENS` tokens, at least 1."""
    sequences = max(1, batch.sequences // layout.dp)
    return max(size for size in divisors(sequences) if size == 1 or size * batch.seq_len <= _MICROBATCH_TOKENS)


def estimate_standard_layouts(job: Job) -> tuple[StandardLayout, ...]:
    """Estimate each standard layout with the fastest microbatch and recomputation that fit.

    If none fits, use those with the least memory. An illegal layout gets its problems instead of an estimate.
    """
    layouts = [
        (title, layout, illegal(job.model, layout, job.cluster, job.batch)) for title, layout in standard_layouts(job)
    ]
    legal = [_variants(layout) for _, layout, reasons in layouts if not reasons]
    best = _best_of_groups(job, legal)
    return tuple(
        StandardLayout(title, layout, tuple(reasons)) if reasons else _with_estimate(job, title, next(best))
        for title, layout, reasons in layouts
    )


def _with_estimate(job: Job, title: str, layout: Layout) -> StandardLayout:
    return StandardLayout(title, layout, estimate=estimate(job, layout))


def _best_of_groups(job: Job, groups: list[list[Layout]]) -> Iterator[Layout]:
    """Yield for each group the fastest of its layouts that fit, or the one with the least memory if none fits.

    All layouts are estimated in one call.
    """
    layouts = [layout for group in groups for layout in group]
    if not layouts:
        return
    estimates, capacity, start = estimate_many(job, layouts), usable_memory(job), 0
    for group in groups:
        rows = range(start, start + len(group))
        fitting = [row for row in rows if estimates.memory[row] <= capacity]
        best = (
            min(fitting, key=lambda row: estimates.seconds[row])
            if fitting
            else min(rows, key=lambda row: estimates.memory[row])
        )
        yield layouts[best]
        start += len(group)


def _variants(layout: Layout) -> list[Layout]:
    """Return `layout` with each kind of recomputation and each divisor of its microbatch."""
    sizes = divisors(layout.microbatch)
    return [replace(layout, recompute=how, microbatch=size) for size in sizes for how in RECOMPUTE]
