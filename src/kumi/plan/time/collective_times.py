"""How long a collective takes on the links that its group crosses."""

from __future__ import annotations

import numpy as np

from kumi.plan.layout_batch import Floats, Numbers
from kumi.spec.cluster import ClusterSpec

# Seconds that a pass of a collective takes besides its bytes and its latency: what ranks that computed the same for not
# quite the same time wait for each other, and what fills the copies' pipeline. Fitted to tensor-parallel runs on A100
# (SC'21, Hagemann, vTrain), where it is as much with NVLink of half the speed; one for GPUs of all kinds. Processes on
# CPUs have their own share of it in what is measured as latency.
WAIT = {"cuda": 1.0e-4, "cpu": 0.0}


def members(stride: Floats, degree: Floats, span: float) -> Floats:
    """How many of a group's `degree` ranks, `stride` apart, share an aligned block of `span` ranks."""
    return np.clip(np.floor(span / stride), 1.0, degree)


def ring(cluster: ClusterSpec, stride: Floats, degree: Floats) -> tuple[Floats, Floats]:
    """Bytes/s that a ring through the group moves, and mean seconds of latency from a rank to the next.

    A ring enters and leaves each node once for every network card its ranks there have, so that ranks of one node add
    their shares of the network up; its pace is that of its slowest link.
    """
    bandwidth, latency = np.full_like(degree, np.inf), np.zeros_like(degree)
    inside = np.ones_like(degree)
    for link in cluster.links:
        reach = members(stride, degree, link.span)
        crossed = reach > inside
        speed = link.bandwidth * link.efficiency * inside
        bandwidth = np.where(crossed, np.minimum(bandwidth, speed), bandwidth)
        # Of every `reach` hops, those that stay inside a smaller block were counted before.
        latency = np.where(crossed, latency + (link.latency - latency) / inside, latency)
        inside = np.maximum(inside, reach)
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
    """Seconds of one collective of `kind` over `size` bytes (the whole tensor) in groups of `degree` ranks.

    `stride` is the distance of neighbours in ranks. all_gather and reduce_scatter run as rings (Patarasuk and Yuan,
    2009), all_reduce as the better of a ring and a double binary tree; all_to_all sends from every rank to every other,
    `size` being what one rank sends in all; send goes to the next rank. Where `size` is cut into several `messages`,
    one after another, each has its own latency. Where an all-to-all sends every element to `copies` ranks, those
    beyond a link share the one that crosses it.
    """
    size, degree, stride = (np.asarray(value, np.float64) for value in np.broadcast_arrays(size, degree, stride))
    if not cluster.links:
        return np.zeros_like(size)
    if kind == "send":
        return np.where(size > 0, _send(cluster, size, degree, stride), 0.0)
    if kind == "all_to_all":
        seconds = _all_to_all(cluster, size, degree, stride, copies)
    else:
        bandwidth, latency = ring(cluster, stride, degree)
        passes = 2.0 if kind == "all_reduce" else 1.0
        moved = passes * size * (degree - 1) / degree
        wait = WAIT[cluster.device.kind]
        seconds = messages * passes * (degree - 1) * latency + moved / bandwidth + passes * wait
        if kind == "all_reduce":
            tree = 2 * np.ceil(np.log2(np.maximum(degree, 2))) * _longest(cluster, stride, degree)
            seconds = np.minimum(seconds, messages * tree + 2 * size / bandwidth + 2 * wait)
    return np.where((degree > 1) & (size > 0), seconds, 0.0)


def _send(cluster: ClusterSpec, size: Floats, degree: Floats, stride: Floats) -> Floats:
    """Seconds to send `size` bytes to the next rank of the group, where that is slowest: all wait for it."""
    seconds, inside = np.zeros_like(size), np.ones_like(size)
    for link in cluster.links:
        reach = members(stride, degree, link.span)
        own = link.latency + size / (link.bandwidth * link.efficiency)
        seconds = np.where(reach > inside, np.maximum(seconds, own), seconds)
        inside = np.maximum(inside, reach)
    return seconds


def _all_to_all(cluster: ClusterSpec, size: Floats, degree: Floats, stride: Floats, copies: int) -> Floats:
    """Every rank sends an equal part to every other; what crosses each link goes over it at the same time. Of `copies`
    that go anywhere, one is sent to each block behind a link that has some: `once` is the share of them that is left.
    """
    seconds, inside = np.zeros_like(size), np.ones_like(size)
    for link in cluster.links:
        reach = members(stride, degree, link.span)
        blocks = degree / inside
        once = blocks * (1 - (1 - 1 / blocks) ** copies) / copies
        part = once * size * (reach - inside) / degree
        own = link.latency * np.log2(np.maximum(reach, 2)) + part / (link.bandwidth * link.efficiency)
        seconds = np.where(reach > inside, np.maximum(seconds, own), seconds)
        inside = np.maximum(inside, reach)
    return seconds


def _longest(cluster: ClusterSpec, stride: Floats, degree: Floats) -> Floats:
    """Latency of the slowest link that the group crosses."""
    latency, inside = np.zeros_like(degree), np.ones_like(degree)
    for link in cluster.links:
        reach = members(stride, degree, link.span)
        latency = np.where(reach > inside, np.maximum(latency, link.latency), latency)
        inside = np.maximum(inside, reach)
    return latency


def link_name(cluster: ClusterSpec, stride: int, degree: int) -> str:
    """Name of the slowest link that a group crosses; empty where nothing is known of links or nothing is sent."""
    if degree <= 1 or not cluster.links:
        return ""
    return cluster.links[cluster.level(stride, degree)].name
