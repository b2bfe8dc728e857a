"""Assemble a cluster: nodes, the links inside them, and the links between nodes and between sites.

The span of a link is the number of consecutive devices that it connects.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from kumi.config.cluster_file import DeviceFile, LinkFile, NetworkFile, NodeFile, given_fields
from kumi.config.job_sections import ClusterSection
from kumi.config.presets import preset_list, preset_names, read_network
from kumi.errors import ConfigError
from kumi.spec.cluster import ClusterSpec, Device, Host, Link, MachineRuns


def assemble_cluster(section: ClusterSection, node: NodeFile, source: str) -> ClusterSpec:
    """Return the cluster that `section` describes, of nodes like `node`, which was read from `source`.

    Raise ConfigError if the sizes contradict each other, or a network is missing or has nothing to connect.
    """
    ranks = section.devices_per_node or node.devices_per_node
    if ranks > node.devices_per_node:
        raise ConfigError(
            f"cluster.devices_per_node={ranks}: {source} has {node.devices_per_node} devices per node; "
            f"use at most {node.devices_per_node}"
        )
    if node.device.kind == "cpu" and ranks < node.devices_per_node:
        raise ConfigError(
            f"cluster.devices_per_node={ranks}: {source} describes {node.devices_per_node} ranks that share a CPU, and "
            f"fewer ranks would each have a larger share of it; measure them with kumi bench --ranks {ranks}, or leave "
            f"the key out"
        )
    if section.nodes % section.sites:
        raise ConfigError(
            f"cluster.sites={section.sites} does not divide cluster.nodes={section.nodes}, and all sites have equally "
            f"many nodes; change one of them"
        )
    host = Host(**given_fields(node.host))
    shape = ClusterShape(node, ranks, section.nodes // section.sites, section.sites)
    inner = shape.inner_links()
    outer = [*_node_network(section, shape, inner), *_site_link(section, shape)]
    links = _with_unique_names([*inner, *(shape.outer_link(file, span, host) for file, span in outer)])
    device = replace(to_device(node.device), price=section.price_per_hour)
    if section.watts is not None:
        device = replace(device, watts=section.watts)
    assumed = tuple(_assumed(node, [file for file, _ in outer]))
    measured = None if node.measured is None else MachineRuns(**node.measured.model_dump())
    return ClusterSpec(source, device, ranks, section.nodes, section.sites, links, host, assumed, measured)


def _with_unique_names(links: list[Link]) -> tuple[Link, ...]:
    """Return `links` with unique names: sites may be connected by the same network as their nodes."""
    named: list[Link] = []
    for link in links:
        taken = link.name in {other.name for other in named}
        named.append(replace(link, name=f"{link.name}, over {link.span} devices") if taken else link)
    return tuple(named)


def to_device(file: DeviceFile) -> Device:
    """Return the device that `file` describes; missing figures have the defaults of `Device`."""
    fields = given_fields(file)
    fields["peak"] = tuple(fields.pop("peak_flops").items())
    if file.matmul is not None:
        fields["matmul"] = tuple(("" if dtype == "other" else dtype, share) for dtype, share in file.matmul.items())
    if file.read is not None:
        fields["read"] = tuple(file.read.items())
    if file.attention is not None:
        fields["attention"] = (file.attention.forward, file.attention.backward)
        fields["attention_lengths"] = tuple(
            (item.tokens, item.forward, item.backward) for item in file.attention.by_length
        )
    return Device(**fields)


def _assumed(node: NodeFile, networks: list[NetworkFile]) -> Iterator[str]:
    """Yield the figures of a cluster that are assumptions, neither measured nor in a data sheet."""
    yield from (f"device.{name}" for name in node.device.assumed())
    yield from (f"host.{name}" for name in node.host.assumed())
    links: list[LinkFile | NetworkFile] = [*node.links, *networks]
    yield from (f"{link.name}: {name}" for link in links for name in link.assumed())


@dataclass(frozen=True)
class ClusterShape:
    """The sizes of a cluster.

    `node`: the kind of node.
    `ranks`: devices used of each node.
    `nodes`: nodes of a site.
    `sites`: number of sites.
    """

    node: NodeFile
    ranks: int
    nodes: int
    sites: int

    @property
    def site_devices(self) -> int:
        """The number of devices of a site."""
        return self.nodes * self.ranks

    def inner_links(self) -> list[Link]:
        """Return the links inside a node, or inside a domain of nodes such as NVL72, from the innermost outwards.

        Links that connect no further device in this cluster are left out.
        """
        links: list[Link] = []
        for link in self.node.links:
            span = self._span(link.span)
            if span > (links[-1].span if links else 1):
                links.append(Link(link.name, span, link.bandwidth, link.latency, link.efficiency))
        return links

    def _span(self, span: int) -> int:
        """Return the number of devices that a link of `span` connects in this cluster.

        If the nodes of a site do not fill all domains, each domain gets the same number of nodes: the largest divisor
        of the number of nodes that fits a domain. 64 nodes in domains of 18 nodes make four domains of 16 nodes.
        """
        full = self.node.devices_per_node
        if span <= full:
            return min(span, self.ranks)
        return self.ranks * max(count for count in range(1, span // full + 1) if self.nodes % count == 0)

    def outer_link(self, file: NetworkFile, span: int, host: Host) -> Link:
        """Return `file` as a link over `span` devices.

        The bandwidth of a node or a site is divided equally among its devices. No device gets more of the bandwidth of
        its node than its link to the host carries.
        """
        bandwidth = file.bandwidth / {"device": 1, "node": self.ranks, "site": self.site_devices}[file.per]
        if host.device_bandwidth and file.per == "node":
            bandwidth = min(bandwidth, host.device_bandwidth)
        return Link(file.name, span, bandwidth, file.latency, file.efficiency)


def _node_network(section: ClusterSection, shape: ClusterShape, inner: list[Link]) -> Iterator[tuple[NetworkFile, int]]:
    """Yield the network between the nodes of a site, with its span, unless an inner link already connects the nodes."""
    file = shape.node.network if section.network is None else read_network(section.network)
    if file is not None and file.per == "site":
        raise ConfigError(
            f"cluster.network: {file.name} connects sites, not nodes; set cluster.site_link to it, and cluster.network "
            f"to the network between the nodes of a site"
        )
    if shape.nodes == 1 or (inner and inner[-1].span == shape.site_devices):
        return
    if file is not None:
        yield file, shape.site_devices
    elif section.source != "auto":
        raise ConfigError(
            f"cluster.network is not set, and {section.source} names no network between its nodes; set it to "
            f"{', '.join(_node_networks())}, or a TOML file"
        )


def _node_networks() -> list[str]:
    """Return the presets of networks between nodes."""
    return [name for name in preset_names("networks") if read_network(name).per != "site"]


def _site_link(section: ClusterSection, shape: ClusterShape) -> Iterator[tuple[NetworkFile, int]]:
    """Yield the network between the sites, with its span of all devices, if there are several sites."""
    if section.sites > 1 and section.site_link is None:
        raise ConfigError(
            f"cluster.sites={section.sites}, but cluster.site_link is not set; set it to the network between the "
            f"sites: {preset_list('networks')}, or a TOML file"
        )
    if section.site_link is None:
        return
    if section.sites == 1:
        raise ConfigError(
            f"cluster.site_link={section.site_link!r} connects sites, but cluster.sites is 1; set cluster.sites, or "
            f"remove cluster.site_link"
        )
    yield read_network(section.site_link, "cluster.site_link"), shape.site_devices * shape.sites
