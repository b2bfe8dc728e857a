"""The layouts that the field would have tried first on such machines: DDP, FSDP, DeepSpeed, Megatron-style and so on.

They come from what guides say and are sized by the guides' own rules, so that a report can say what they would give.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from kumi.plan.estimate import estimate, estimate_many
from kumi.plan.memory import usable
from kumi.report.report import Expected
from kumi.spec.batch import BatchSpec
from kumi.spec.checks import divisors, problems
from kumi.spec.job import Job
from kumi.spec.layout import RECOMPUTE, Layout
from kumi.spec.ledger import kind_ops, num_params
from kumi.spec.sharding import AXIS

# Past this many tokens a microbatch no longer makes matrix products faster, it only takes memory.
MICROBATCH_TOKENS = 32768
# Megatron's users size TP x PP so that the states fill this much of a device, at 6 bytes a parameter and 12 divided.
STATES_SHARE = 0.6


def expected_layouts(job: Job) -> list[tuple[str, Layout]]:
    """The layouts that guides recommend for such machines, by the name they go by; legal or not, fitting or not."""
    found = _one_device(job) if job.cluster.devices == 1 else _many_devices(job)
    return [(title, replace(layout, microbatch=_microbatch(job.batch, layout))) for title, layout in found]


def _one_device(job: Job) -> list[tuple[str, Layout]]:
    host, found = job.cluster.host, [("Plain (all on the device)", Layout())]
    if host.device_bandwidth:
        found.append(("ZeRO-Offload (optimizer states on the host)", Layout(offload="optimizer")))
        found.append(("ZeRO-Offload (all states on the host)", Layout(offload="states")))
    if host.device_bandwidth and host.nvme and host.nvme_bandwidth:
        found.append(("ZeRO-Infinity (all states on NVMe)", Layout(offload="states-nvme")))
    return found


def _many_devices(job: Job) -> list[tuple[str, Layout]]:
    devices, node = job.cluster.devices, job.cluster.devices_per_node
    found = [
        ("DDP (a whole copy on every device)", Layout(dp_replicate=devices)),
        ("DeepSpeed ZeRO-2 over all devices", Layout(dp_shard=devices, zero=2)),
        ("FSDP (ZeRO-3) over all devices", Layout(dp_shard=devices, zero=3)),
    ]
    if 1 < node < devices:
        shape = Layout(dp_replicate=devices // node, dp_shard=node, zero=3)
        found.append(("HSDP (shards in a node, copies across)", shape))
    tp = _most_tp(job)
    if tp > 1:
        rest = devices // tp
        shape = Layout(tp=tp, dp_shard=rest, zero=3 if rest > 1 else 0)
        found.append(("TP in the node, FSDP across" if rest > 1 else "TP over the node", shape))
    found.append(("Megatron-LM (TP x PP, ZeRO-1)", _megatron(job)))
    if job.cluster.host.device_bandwidth:
        shape = Layout(dp_shard=devices, zero=3, offload="states")
        found.append(("DeepSpeed ZeRO-3 (states on the host)", shape))
    return found


def _most_tp(job: Job) -> int:
    """The largest tp inside a node that cuts what it cuts of every layer into equal parts."""
    ops = (op for kind in kind_ops(job.model) for op in kind)
    counts = {dim.count for op in ops for dim in (op.source, op.target) if AXIS.get(dim.name) == "tp"}
    return max(size for size in divisors(job.cluster.devices_per_node) if all(count % size == 0 for count in counts))


def _megatron(job: Job) -> Layout:
    """The least tp, then pp, at which the states by the field's rule leave room: tp grows to a node before pp does."""
    devices, memory = job.cluster.devices, job.cluster.device.memory
    model_axes = [(tp, 1) for tp in divisors(_most_tp(job))]
    model_axes += [
        (_most_tp(job), pp) for pp in divisors(devices // _most_tp(job)) if 1 < pp <= job.model.num_hidden_layers
    ]
    for tp, pp in model_axes:
        rest = devices // (tp * pp)
        if num_params(job.model) / (tp * pp) * (6 + 12 / rest) <= STATES_SHARE * memory:
            break
    return Layout(tp=tp, pp=pp, dp_shard=rest, zero=1 if rest > 1 else 0)


def _microbatch(batch: BatchSpec, layout: Layout) -> int:
    """The largest share of a rank's sequences that is not too many tokens."""
    share = max(1, batch.sequences // layout.dp)
    return max(size for size in divisors(share) if size == 1 or size * batch.seq_len <= MICROBATCH_TOKENS)


def expected(job: Job) -> tuple[Expected, ...]:
    """What becomes of each of `expected_layouts`: the fastest way to run it that fits, else the leanest."""
    found = [
        (title, layout, problems(job.model, layout, job.cluster, job.batch)) for title, layout in expected_layouts(job)
    ]
    legal = [_variants(layout) for _, layout, said in found if not said]
    picked = iter(_picked(job, legal))
    return tuple(
        Expected(title, layout, tuple(said)) if said else _estimated(job, title, next(picked))
        for title, layout, said in found
    )


def _estimated(job: Job, title: str, layout: Layout) -> Expected:
    return Expected(title, layout, estimate=estimate(job, layout))


def _picked(job: Job, groups: list[list[Layout]]) -> Iterator[Layout]:
    """Of each group the fastest layout that fits, else the one that needs the least memory; all timed at once."""
    every = [layout for group in groups for layout in group]
    if not every:
        return
    many, capacity, start = estimate_many(job, every), usable(job.cluster.device), 0
    for group in groups:
        rows = range(start, start + len(group))
        fitting = [row for row in rows if many.memory[row] <= capacity]
        best = (
            min(fitting, key=lambda row: many.seconds[row]) if fitting else min(rows, key=lambda row: many.memory[row])
        )
        yield every[best]
        start += len(group)


def _variants(layout: Layout) -> list[Layout]:
    """What is left to a user who has decided on the degrees: recomputation, and a smaller microbatch."""
    sizes = divisors(layout.microbatch)
    return [replace(layout, recompute=how, microbatch=size) for size in sizes for how in RECOMPUTE]
