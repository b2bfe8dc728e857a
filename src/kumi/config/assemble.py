"""Put a cluster together: nodes, the links inside of them, and what joins nodes and sites."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from kumi.config.cluster_file import DeviceFile, LinkFile, NetworkFile, NodeFile, given
from kumi.config.presets import listed, presets, read_network
from kumi.config.schema import ClusterSection
from kumi.errors import ConfigError
from kumi.spec.cluster import ClusterSpec, Device, Host, Link


def assemble(section: ClusterSection, node: NodeFile, source: str) -> ClusterSpec:
    """As many of `node` as `section` says, joined by the network and the link between sites that it names."""
    ranks = section.devices_per_node or node.devices_per_node
    if ranks > node.devices_per_node:
        raise ConfigError(
            f"cluster.devices_per_node={ranks}: {source} has {node.devices_per_node} devices a node; use at most those"
        )
    if node.device.kind == "cpu" and ranks < node.devices_per_node:
        raise ConfigError(
            f"cluster.devices_per_node={ranks}: {source} describes {node.devices_per_node} ranks that share a CPU, and "
            f"fewer would have more of it each; measure them with kumi bench --ranks {ranks}, or leave it out"
        )
    if section.nodes % section.sites:
        raise ConfigError(
            f"cluster.sites={section.sites} does not divide cluster.nodes={section.nodes}; "
            f"give every site as many nodes"
        )
    host = Host(**given(node.host))
    joined = Joined(node, ranks, section.nodes // section.sites, section.sites)
    inner = joined.inner()
    outer = [*_network(section, joined, inner), *_site_link(section, joined)]
    links = _told_apart([*inner, *(joined.outer(file, span, host) for file, span in outer)])
    device = replace(to_device(node.device), price=section.price_per_hour)
    if section.watts is not None:
        device = replace(device, watts=section.watts)
    assumed = tuple(_assumed(node, [file for file, _ in outer]))
    return ClusterSpec(source, device, ranks, section.nodes, section.sites, links, host, assumed)


def _told_apart(links: list[Link]) -> tuple[Link, ...]:
    """`links` with a name of its own each, as two sites may be joined by what joins their nodes."""
    named: list[Link] = []
    for link in links:
        taken = link.name in {other.name for other in named}
        named.append(replace(link, name=f"{link.name}, over {link.span} devices") if taken else link)
    return tuple(named)


def to_device(file: DeviceFile) -> Device:
    """The device that `file` describes; what it leaves out has the defaults of `Device`."""
    fields = given(file)
    fields["peak"] = tuple(fields.pop("peak_flops").items())
    if file.matmul is not None:
        fields["matmul"] = tuple(("" if dtype == "other" else dtype, share) for dtype, share in file.matmul.items())
    if file.attention is not None:
        fields["attention"] = (file.attention.forward, file.attention.backward)
    return Device(**fields)


def _assumed(node: NodeFile, networks: list[NetworkFile]) -> Iterator[str]:
    """The figures of a cluster that nobody measured or promised."""
    yield from (f"device.{name}" for name in node.device.assumed())
    yield from (f"host.{name}" for name in node.host.assumed())
    joints: list[LinkFile | NetworkFile] = [*node.links, *networks]
    yield from (f"{joint.name}: {name}" for joint in joints for name in joint.assumed())


@dataclass(frozen=True)
class Joined:
    """Devices that are to be joined: `ranks` of each `node`, `nodes` of these a site, and `sites`."""

    node: NodeFile
    ranks: int
    nodes: int
    sites: int

    @property
    def site(self) -> int:
        """Devices of a site."""
        return self.nodes * self.ranks

    def inner(self) -> list[Link]:
        """The links of a node, and of a domain of several, as far as there are devices for them to join."""
        links: list[Link] = []
        for link in self.node.links:
            span = self._span(link.span)
            if span > (links[-1].span if links else 1):
                links.append(Link(link.name, span, link.bandwidth, link.latency, link.efficiency))
        return links

    def _span(self, span: int) -> int:
        """The devices that a link of `span` joins here. Where the nodes are no whole number of full domains, each
        domain has the most nodes that deal them evenly: 64 nodes of 4 are four domains of 16, not three of 18."""
        full = self.node.devices_per_node
        if span <= full:
            return min(span, self.ranks)
        return self.ranks * max(count for count in range(1, span // full + 1) if self.nodes % count == 0)

    def outer(self, file: NetworkFile, span: int, host: Host) -> Link:
        """`file` as a link over `span` devices: what a node's or a site's devices share is divided among them, and
        none gets more of a node's than its way to the host lets through."""
        share = file.bandwidth / {"device": 1, "node": self.ranks, "site": self.site}[file.per]
        if host.device_bandwidth and file.per == "node":
            share = min(share, host.device_bandwidth)
        return Link(file.name, span, share, file.latency, file.efficiency)


def _network(section: ClusterSection, joined: Joined, inner: list[Link]) -> Iterator[tuple[NetworkFile, int]]:
    """The network between the nodes of a site and the devices it joins, where nothing faster joins them already."""
    file = joined.node.network if section.network is None else read_network(section.network)
    if file is not None and file.per == "site":
        raise ConfigError(
            f"cluster.network: {file.name} joins sites, not nodes; set cluster.site_link to it, and cluster.network "
            f"to what joins the nodes of a site"
        )
    if joined.nodes == 1 or (inner and inner[-1].span == joined.site):
        return
    if file is not None:
        yield file, joined.site
    elif section.source != "auto":
        raise ConfigError(
            f"cluster.network: {section.source} does not say what joins its nodes; set it to "
            f"{', '.join(_between_nodes())}, or a TOML file"
        )


def _between_nodes() -> list[str]:
    """The networks that come with kumi and join the nodes of a site."""
    return [name for name in presets("networks") if read_network(name).per != "site"]


def _site_link(section: ClusterSection, joined: Joined) -> Iterator[tuple[NetworkFile, int]]:
    """What joins the sites, and all the devices."""
    if section.sites > 1 and section.site_link is None:
        raise ConfigError(
            f"cluster.sites={section.sites}: say what joins the sites; set cluster.site_link to {listed('networks')}, "
            f"or a TOML file"
        )
    if section.site_link is None:
        return
    if section.sites == 1:
        raise ConfigError(
            f"cluster.site_link={section.site_link!r} joins sites, and cluster.sites is 1; "
            f"set cluster.sites, or remove it"
        )
    yield read_network(section.site_link, "cluster.site_link"), joined.site * joined.sites
