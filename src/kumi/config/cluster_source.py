"""The cluster that a run file names: this machine, a preset or a file."""

from __future__ import annotations

from kumi.config.assemble import assemble
from kumi.config.local_machine import this_machine
from kumi.config.presets import read_node
from kumi.config.schema import ClusterSection
from kumi.spec.cluster import ClusterSpec


def cluster_spec(section: ClusterSection) -> ClusterSpec:
    """Return the cluster that `section` names. Raise ConfigError where it cannot be found, read or put together."""
    if section.source == "auto":
        return this_machine(section)
    return assemble(section, read_node(section.source), section.source)


def on_nodes(section: ClusterSection, nodes: int) -> ClusterSpec:
    """Return the cluster that `section` describes, with `nodes` nodes in place of its own."""
    return cluster_spec(section.model_copy(update={"nodes": nodes}))
