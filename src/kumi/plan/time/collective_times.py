"""Seconds of collectives on the links that their process group crosses."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kumi.plan.layout_batch import Floats, Numbers
from kumi.spec.cluster import ClusterSpec, Link

# Fixed seconds per pass of a collective, beyond bandwidth and latency: ranks wait for the slowest rank, and the copy
# pipeline fills. Fitted to tensor-parallel runs on A100 (SC'21, Hagemann, vTrain), where NVLink at half the speed needs
# the same; used for all GPUs. On CPUs the measured latency includes it.
_PASS_SECONDS = {"cuda": 1.0e-4, "cpu": 0.0}


def ranks_in_block(stride: Floats, degree: Floats, span: float) -> Floats:
    """Return how many of a group's `degree` ranks, `stride` apart, share an aligned block of `span` ranks."""
    return np.clip(np.floor(span / stride), 1.0, degree)


def _crossings(cluster: ClusterSpec, stride: Floats, degree: Floats) -> Iterator[tuple[Link, Floats, Floats]]:
    """Yield (link, inside, reach), innermost first.

    A block of a link is the set of `Link.span` consecutive ranks that it connects. Of a group's ranks, `inside` share a
    block of the next inner link, and `reach` share a block of this link.

    A group crosses a link if `reach` is larger than `inside`. The outermost link connects all ranks of the group,
    also those of the two ends of a pipeline, whose distance does not divide its span.
    """
    inside = np.ones_like(degree)
    for link in cluster.links:
        outermost = link is cluster.links[-1]
        reach = np.broadcast_to(degree, inside.shape) if outermost else ranks_in_block(stride, degree, link.span)
        yield link, inside, reach
        inside = np.maximum(inside, reach)


def ring_bandwidth_latency(cluster: ClusterSpec, stride: Floats, degree: Floats) -> tuple[Floats, Floats]:
    """Return the bytes/s of a ring through the group, and the mean seconds of latency per hop.

    A ring crosses a node's border once per network card of the ranks in that node, so that their bandwidths add up.
    The slowest link sets the bandwidth of the ring.
    """
    bandwidth, latency = np.full_like(degree, np.inf), np.zeros_like(degree)
    for link, inside, reach in _crossings(cluster, stride, degree):
        crossed = reach > inside
        speed = link.bandwidth * link.efficiency * inside
        bandwidth = np.where(crossed, np.minimum(bandwidth, speed), bandwidth)
        # One hop in `inside` leaves the inner block; the others have the mean latency inside it.
        latency = np.where(crossed, latency + (link.latency - latency) / inside, latency)
    return bandwidth, latency


def collective_seconds(
    cluster: ClusterSpec,
    kind: str,
    size: Numbers,
    degree: Numbers,
    stride: Numbers,
    messages: Numbers | float = 1.0,
    *,
    copies: int = 1,
) -> Floats:
    """Return the seconds of one collective of `kind` over `size` bytes in groups of `degree` ranks.

    `size`: bytes of the unsharded tensor; for all_to_all and send, the bytes that one rank sends.
    `stride`: distance in ranks between neighbours of the group.
    `messages`: number of messages that `size` is split into, one after another, each with its own latency.
    `copies`: ranks that an all_to_all sends each element to; ranks behind the same link share one transfer.

    all_gather and reduce_scatter run as rings (Patarasuk and Yuan, 2009), all_reduce as the faster of a ring and a
    double binary tree, all_to_all directly between all pairs of ranks, and send to the next rank.
    """
    size, degree, stride = (np.asarray(value, np.float64) for value in np.broadcast_arrays(size, degree, stride))
    if not cluster.links:
        return np.zeros_like(size)
    if kind == "send":
        return np.where(size > 0, _send(cluster, size, degree, stride), 0.0)
    if kind == "all_to_all":
        seconds = _all_to_all(cluster, size, degree, stride, copies)
    else:
        bandwidth, latency = ring_bandwidth_latency(cluster, stride, degree)
        passes = 2.0 if kind == "all_reduce" else 1.0
        moved = passes * size * (degree - 1) / degree
        fixed = _PASS_SECONDS[cluster.device.kind]
        seconds = messages * passes * (degree - 1) * latency + moved / bandwidth + passes * fixed
        if kind == "all_reduce":
            tree = _tree_latency(cluster, degree, stride)
            seconds = np.minimum(seconds, messages * tree + 2 * size / bandwidth + 2 * fixed)
    return np.where((degree > 1) & (size > 0), seconds, 0.0)


def small_all_reduce_seconds(cluster: ClusterSpec, size: Numbers, degree: int) -> Floats:
    """Return the seconds of an all-reduce over `size` bytes between `degree` neighbours that are in step.

    In contrast to `collective_seconds`, no rank waits for a slower one: between the kernels of a decode step ranks have
    no time to drift apart.
    """
    size, ranks, stride = np.broadcast_arrays(np.asarray(size, np.float64), float(degree), 1.0)
    if not cluster.links or degree == 1:
        return np.zeros_like(size)
    bandwidth, _ = ring_bandwidth_latency(cluster, stride, ranks)
    return _tree_latency(cluster, ranks, stride) + 2 * size / bandwidth


def _tree_latency(cluster: ClusterSpec, degree: Floats, stride: Floats) -> Floats:
    """Return the seconds of latency of an all-reduce through a binary tree, up and down."""
    return 2 * np.ceil(np.log2(np.maximum(degree, 2))) * _max_latency(cluster, stride, degree)


def _send(cluster: ClusterSpec, size: Floats, degree: Floats, stride: Floats) -> Floats:
    """Return the seconds to send `size` bytes to the next rank over the slowest link, which all ranks wait for."""
    seconds = np.zeros_like(size)
    for link, inside, reach in _crossings(cluster, stride, degree):
        on_link = link.latency + size / (link.bandwidth * link.efficiency)
        seconds = np.where(reach > inside, np.maximum(seconds, on_link), seconds)
    return seconds


def _all_to_all(cluster: ClusterSpec, size: Floats, degree: Floats, stride: Floats, copies: int) -> Floats:
    """Return the seconds in which every rank sends equal parts to all others, with all links in use at the same time.

    An element routed to `copies` ranks crosses a link once per block of ranks behind it: the crossing share is the
    expected number of distinct blocks / `copies`.
    """
    seconds = np.zeros_like(size)
    for link, inside, reach in _crossings(cluster, stride, degree):
        blocks = degree / inside
        crossing_share = blocks * (1 - (1 - 1 / blocks) ** copies) / copies
        sent = crossing_share * size * (reach - inside) / degree
        on_link = link.latency * np.log2(np.maximum(reach, 2)) + sent / (link.bandwidth * link.efficiency)
        seconds = np.where(reach > inside, np.maximum(seconds, on_link), seconds)
    return seconds


def _max_latency(cluster: ClusterSpec, stride: Floats, degree: Floats) -> Floats:
    """Return the largest latency of the links that the group crosses."""
    latency = np.zeros_like(degree)
    for link, inside, reach in _crossings(cluster, stride, degree):
        latency = np.where(reach > inside, np.maximum(latency, link.latency), latency)
    return latency


def link_name(cluster: ClusterSpec, stride: int, degree: int) -> str:
    """Return the name of the slowest link that a group crosses, empty without links or with a single rank."""
    if degree <= 1 or not cluster.links:
        return ""
    return cluster.links[cluster.level(stride, degree)].name
