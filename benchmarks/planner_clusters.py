"""The machines of a run: a node preset with the network and the bandwidths that its row names."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache

from planner_defaults import NETWORK_OF, NODE_OF, first
from planner_rows import Run

from kumi.config.assemble import assemble_cluster
from kumi.config.job_sections import ClusterSection
from kumi.config.presets import preset_names, read_node
from kumi.errors import KumiError
from kumi.spec.cluster import ClusterSpec


def cluster_of(run: Run, world: int) -> ClusterSpec | str:
    """The machines of a run: its GPU's preset, with the network that the row or its text names."""
    preset = node_of(run)
    if preset is None:
        return f"gpu: nothing is known of {run.gpu or 'a blank one'!r}"
    network = first(NETWORK_OF, f"{run.inter} {run.text} {run.gpu}".lower())
    network = network if network in _presets("networks") else None
    per_node = min(run.gpus_per_node or _node_devices(preset), world, _node_devices(preset))
    try:
        cluster = machines(preset, per_node, -(-world // per_node), network)
    except KumiError as error:
        return f"cluster: {error}"
    return with_bandwidth(cluster, run)


def node_of(run: Run) -> str | None:
    """The preset of the run's node; None where there is none for its GPU."""
    preset = first(NODE_OF, run.gpu.lower())
    return preset if preset in _presets("nodes") else None


def devices_of_node(run: Run) -> int:
    """GPUs of a node: the column, else of the GPU's preset, else eight."""
    preset = node_of(run)
    return run.gpus_per_node or (_node_devices(preset) if preset else 8)


@lru_cache(maxsize=1024)
def machines(preset: str, per_node: int, nodes: int, network: str | None) -> ClusterSpec:
    """`nodes` of a preset with `per_node` devices each, joined by `network` where it is given."""
    section = ClusterSection(source=preset, nodes=nodes, devices_per_node=per_node, network=network)
    return assemble_cluster(section, read_node(preset), preset)


@lru_cache(maxsize=2)
def _presets(kind: str) -> tuple[str, ...]:
    return tuple(preset_names(kind))


@lru_cache(maxsize=64)
def _node_devices(preset: str) -> int:
    return read_node(preset).devices_per_node


def with_bandwidth(cluster: ClusterSpec, run: Run) -> ClusterSpec:
    """`cluster` with the bandwidths that the row states: of a device's NVLink both ways together, as vendors do, and
    of the network for each node, or each GPU where it says so or names a card's speed alone."""
    links = list(cluster.links)
    intra, inter = bytes_per_second(run.intra), bytes_per_second(run.inter)
    if intra and links and links[0].span <= cluster.devices_per_node:
        links[0] = replace(links[0], bandwidth=intra / 2)
    if inter and cluster.nodes > 1 and len(links) > 1:
        shared = cluster.devices_per_node if "per node" in run.inter.lower() else 1
        links[-1] = replace(links[-1], bandwidth=inter / shared)
    return replace(cluster, links=tuple(links))


def bytes_per_second(text: str) -> float | None:
    """The bandwidth that `text` states ("NVLink 600 GB/s", "400 Gb/s per GPU"); None where it states none."""
    match = re.search(r"([\d.]+)\s*(gb/s|gbps|gb/s|tb/s)", text, re.IGNORECASE)
    if match is None:
        return None
    unit = match.group(2)
    scale = 1e12 if unit[0] in "tT" else 1e9
    return float(match.group(1)) * scale / (8 if "b" in unit[1:] and "B" not in unit else 1)
