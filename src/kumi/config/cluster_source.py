"""The cluster of a run file: this machine, a preset or a TOML file."""

from __future__ import annotations

from kumi.config.assemble import assemble_cluster
from kumi.config.job_sections import ClusterSection
from kumi.config.local_machine import this_machine
from kumi.config.presets import read_node
from kumi.spec.cluster import ClusterSpec


def cluster_spec(section: ClusterSection) -> ClusterSpec:
    """Return the cluster that `section` describes. Raise ConfigError if it is not found or not valid."""
    if section.source == "auto":
        return this_machine(section)
    return assemble_cluster(section, read_node(section.source), section.source)


def cluster_with_nodes(section: ClusterSection, nodes: int) -> ClusterSpec:
    """Return the cluster that `section` describes, with `nodes` nodes instead of its own number."""
    return cluster_spec(section.model_copy(update={"nodes": nodes}))
