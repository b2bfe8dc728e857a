"""The smallest changes that would make a job fit, with numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from kumi.plan.estimates import Estimate
from kumi.plan.search.candidates import Pins
from kumi.plan.search.search_layouts import smallest
from kumi.spec.job import Job
from kumi.units import format_bytes

# How many times the machines are doubled before giving up on more of them.
DOUBLINGS = 10


def remedies(job: Job, pinned: Pins, least: Estimate, fixed: Pins) -> list[str]:
    """What would help, each alone: unpinning, more nodes where it is known what joins them, shorter sequences, a larger
    card, a described host. What is `fixed` stays so whatever is pinned."""
    every = {**pinned, **fixed}
    found = [*_unpinned(job, pinned, fixed), *_more_nodes(job, every), *_shorter(job, every), *_host(job, every)]
    short = least.peak_memory / max(1, least.usable)
    card = format_bytes(short * job.cluster.device.memory)
    return [*found, f"use devices of {card} or more instead of {format_bytes(job.cluster.device.memory)}"]


def fits(job: Job, pinned: Pins) -> bool:
    """Whether some layout of `job` fits. Where one does, it also does with microbatches of one sequence, but for
    ZeRO-1, whose whole gradients wait for further microbatches."""
    few = {} if pinned.get("zero") == 1 else {"microbatch": 1}
    found = smallest(job, {**few, **pinned})
    return found is not None and found.fits


def _unpinned(job: Job, pinned: Pins, fixed: Pins) -> Iterator[str]:
    """The one pin without which something fits."""
    for name, value in pinned.items():
        rest = {key: other for key, other in pinned.items() if key != name} | dict(fixed)
        if fits(job, rest):
            yield f"do not pin layout.{name}={value}"
            return


def _more_nodes(job: Job, pinned: Pins) -> Iterator[str]:
    for _ in range(DOUBLINGS if job.of_nodes else 0):
        device, nodes = job.cluster.device, 2 * job.cluster.nodes
        job = job.on_nodes(nodes)
        job = replace(job, cluster=replace(job.cluster, device=device))
        if job.cluster.devices > job.batch.sequences * 64:
            return
        if fits(job, pinned):
            yield f"set cluster.nodes={nodes} ({job.cluster.devices} devices)"
            return


def _shorter(job: Job, pinned: Pins) -> Iterator[str]:
    seq_len = job.batch.seq_len
    while seq_len > 512:
        seq_len //= 2
        if fits(replace(job, batch=replace(job.batch, seq_len=seq_len)), pinned):
            yield f"shorten batch.seq_len from {job.batch.seq_len} to {seq_len}"
            return


def _host(job: Job, pinned: Pins) -> Iterator[str]:
    """Offloading, where the cluster file does not say what the host has."""
    host = job.cluster.host
    if (host.memory and host.device_bandwidth) or pinned.get("offload") == "none":
        return
    known = replace(host, memory=2**41, device_bandwidth=25e9)
    if fits(replace(job, cluster=replace(job.cluster, host=known)), pinned):
        yield "describe the host's memory and its link in the cluster file, so that states can be offloaded to it"
