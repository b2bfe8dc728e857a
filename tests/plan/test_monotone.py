"""Better machines never make a plan worse by more than its own interval, and plans are the same every time."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from small import HOST, LINKS, NO_HOST, job, model

from kumi.errors import FitError
from kumi.plan.session import plan


def request(seed):
    """Return a random small job."""
    draw = random.Random(seed)
    of = model(draw.choice([4, 6, 8]), experts=draw.choice([0, 0, 4]), hidden=draw.choice([256, 512, 1024]))
    memory = draw.choice([2**29, 2**30, 2**32, 2**34])
    sequences, host = draw.choice([8, 16, 64]), draw.choice([HOST, NO_HOST])
    seq_len = draw.choice([512, 2048, 8192])
    return replace(
        job(draw.choice([1, 2, 4]), of=of, sequences=sequences, seq_len=seq_len, memory=memory, host=host), margin=None
    )


def on_cluster(task, **changes):
    return replace(task, cluster=replace(task.cluster, **changes))


def improved(task):
    """Yield the job on better machines, by what is better."""
    device = task.cluster.device
    yield "more memory", on_cluster(task, device=replace(device, memory=2 * device.memory))
    peak = tuple((dtype, 2 * flops) for dtype, flops in device.peak)
    faster = replace(device, peak=peak, memory_bandwidth=2 * device.memory_bandwidth)
    yield "faster devices", on_cluster(task, device=faster)
    links = tuple(replace(link, bandwidth=2 * link.bandwidth, latency=link.latency / 2) for link in task.cluster.links)
    yield "faster links", on_cluster(task, links=links)
    # A plan uses all devices: with fewer sequences than devices, more of them only add communication.
    if task.batch.sequences >= 2 * task.cluster.devices:
        yield "more nodes", on_cluster(task, nodes=2 * task.cluster.nodes, links=LINKS)


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[] if seed < 4 else pytest.mark.exhaustive) for seed in range(300)]
)
def test_better_machines_do_not_make_a_plan_worse(seed):
    task = request(seed)
    try:
        report = plan(task, {}, front=False)
    except FitError:
        report = None
    if report is not None:
        assert plan(task, {}, front=False).best == report.best
    for what, better in improved(task):
        try:
            best = plan(better, {}, front=False).best
        except FitError:
            assert report is None, f"{what}: nothing fits any more"
            continue
        if report is not None:
            assert best.step_seconds <= report.uncertainty.time90.high, what
