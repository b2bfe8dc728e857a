"""Cluster descriptions: this machine, a preset, or a TOML file, as many of them as the run file says."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from kumi.config.cluster_file import DeviceFile, LinkFile, NetworkFile, NodeFile, given
from kumi.config.schema import ClusterSection, Section
from kumi.config.sentences import sentences
from kumi.errors import ConfigError
from kumi.spec.cluster import ClusterSpec, Device, Host, Link

File = TypeVar("File", bound=Section)


def presets(kind: str = "nodes") -> list[str]:
    """Names of the nodes, devices or networks that come with kumi."""
    return sorted(item.name.removesuffix(".toml") for item in _folder(kind).iterdir() if item.name.endswith(".toml"))


def cluster_spec(section: ClusterSection) -> ClusterSpec:
    """The cluster that `section` names. Raises ConfigError when it cannot be found, read or put together."""
    if section.source == "auto":
        from kumi.config.machine import this_machine

        return this_machine(section)
    return assemble(section, read_node(section.source), section.source)


def assemble(section: ClusterSection, node: NodeFile, source: str) -> ClusterSpec:
    """As many of `node` as `section` says, joined by the network and the link between sites that it names."""
    ranks = section.devices_per_node or node.devices_per_node
    if ranks > node.devices_per_node:
        raise ConfigError(
            f"cluster.devices_per_node={ranks}: {source} has {node.devices_per_node} devices a node; use at most those"
        )
    if section.nodes % section.sites:
        raise ConfigError(
            f"cluster.sites={section.sites} does not divide cluster.nodes={section.nodes}; "
            f"give every site as many nodes"
        )
    host = Host(**given(node.host))
    joined = _Joined(node, ranks, section.nodes, section.sites, host.device_bandwidth)
    outer = [*_network(section, node, joined), *_site_link(section, joined)]
    device = to_device(node.device)
    if section.watts is not None:
        device = replace(device, watts=section.watts)
    return ClusterSpec(
        source,
        replace(device, price=section.price_per_hour),
        ranks,
        section.nodes,
        section.sites,
        (*joined.inner(), *(link for _, link in outer)),
        host,
        tuple(_assumed(node, [file for file, _ in outer])),
    )


def _assumed(node: NodeFile, networks: list[NetworkFile]) -> Iterator[str]:
    """The figures of a cluster that nobody measured or promised."""
    yield from (f"device.{name}" for name in node.device.assumed())
    yield from (f"host.{name}" for name in node.host.assumed())
    joints: list[LinkFile | NetworkFile] = [*node.links, *networks]
    yield from (f"{joint.name}: {name}" for joint in joints for name in joint.assumed())


def to_device(file: DeviceFile) -> Device:
    """The device that `file` describes; what it leaves out has the defaults of `Device`."""
    found = given(file)
    found["peak"] = tuple(found.pop("peak_flops").items())
    if file.matmul is not None:
        found["matmul"] = tuple(("" if dtype == "other" else dtype, share) for dtype, share in file.matmul.items())
    if file.attention is not None:
        found["attention"] = (file.attention.forward, file.attention.backward)
    return Device(**found)


def read_node(source: str) -> NodeFile:
    """The node that `source` names, a preset or a TOML file, with the devices and networks that it refers to."""
    written = _table("nodes", source, "cluster.source", "'auto', ")
    for key, kind in (("device", "devices"), ("network", "networks")):
        if isinstance(written.get(key), str):
            written[key] = _table(kind, written[key], f"cluster.source: {source}: {key}")
    return _checked(NodeFile, written, f"cluster.source: {source}")


def read_device(name: str) -> DeviceFile:
    """The device that comes with kumi as `name`."""
    return _checked(DeviceFile, _table("devices", name, "device"), f"device: {name}")


def read_network(name: str, key: str = "cluster.network") -> NetworkFile:
    """The network that `name`, the value of `key`, names: a preset or a TOML file."""
    return _checked(NetworkFile, _table("networks", name, key), f"{key}: {name}")


class _Joined:
    """How many of which devices are joined: what links and networks need to know to become `Link`s."""

    def __init__(self, node: NodeFile, ranks: int, nodes: int, sites: int, host_bandwidth: float) -> None:
        self.node, self.ranks, self.nodes, self.sites = node, ranks, nodes, sites
        self.site = nodes // sites * ranks
        self.host_bandwidth = host_bandwidth

    def inner(self) -> Iterator[Link]:
        """The links of a node, and of a domain of several, as far as there are devices for them to join."""
        covered = 1
        for link in self.node.links:
            span = self._span(link.span)
            if span > covered:
                yield Link(link.name, span, link.bandwidth, link.latency, link.efficiency)
                covered = span

    def _span(self, span: int) -> int:
        """The devices that a link of `span` joins here. Where the nodes are no whole number of full domains, each
        domain has the most nodes that deal them evenly: 64 nodes of 4 are four domains of 16, not three of 18."""
        full = self.node.devices_per_node
        if span <= full:
            return min(span, self.ranks)
        nodes = self.nodes // self.sites
        return self.ranks * max(count for count in range(1, span // full + 1) if nodes % count == 0)

    def covered(self) -> int:
        return max((link.span for link in self.inner()), default=1)

    def outer(self, file: NetworkFile, span: int) -> Link:
        """`file` as a link over `span` devices: what a node's or a site's devices share is divided among them, and
        none gets more than its way to the host lets through."""
        sharers = {"device": 1, "node": self.ranks, "site": self.site}[file.per]
        share = file.bandwidth / sharers
        if self.host_bandwidth and file.per != "site":
            share = min(share, self.host_bandwidth)
        return Link(file.name, span, share, file.latency, file.efficiency)


def _network(section: ClusterSection, node: NodeFile, joined: _Joined) -> Iterator[tuple[NetworkFile, Link]]:
    """The network between the nodes of a site, where there is more than one that nothing faster joins."""
    file = read_network(section.network) if section.network is not None else node.network
    if joined.site <= max(joined.covered(), joined.ranks):
        return
    if file is None:
        if joined.inner():
            raise ConfigError(
                f"cluster.network: {section.source} does not say what joins its nodes; "
                f"set it to {_listed('networks')}, or a TOML file"
            )
        return
    if file.per == "site":
        raise ConfigError(
            f"cluster.network: {file.name} joins sites, not nodes; set cluster.site_link to it, and cluster.network "
            f"to what joins the nodes of a site"
        )
    yield file, joined.outer(file, joined.site)


def _site_link(section: ClusterSection, joined: _Joined) -> Iterator[tuple[NetworkFile, Link]]:
    if section.sites == 1:
        if section.site_link is not None:
            raise ConfigError(
                f"cluster.site_link={section.site_link!r} joins sites, and cluster.sites is 1; "
                f"set cluster.sites, or remove it"
            )
        return
    if section.site_link is None:
        raise ConfigError(
            f"cluster.sites={section.sites}: say what joins the sites; set cluster.site_link to {_listed('networks')}, "
            f"or a TOML file"
        )
    file = read_network(section.site_link, "cluster.site_link")
    yield file, joined.outer(file, joined.nodes * joined.ranks)


def _folder(kind: str) -> Traversable:
    return files("kumi.clusters").joinpath(kind)


def _listed(kind: str) -> str:
    return ", ".join(presets(kind))


def _table(kind: str, name: str, key: str, besides: str = "") -> dict[str, Any]:
    """The TOML table that `name`, the value of `key`, names: a preset among the `kind`, or a file."""
    file = Path(name) if name.endswith(".toml") else _folder(kind).joinpath(f"{name}.toml")
    if not file.is_file():
        raise ConfigError(f"{key}: {name!r} is no preset and no TOML file; use {besides}{_listed(kind)}, or a file")
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{key}: {name} cannot be read as TOML ({error}); correct the file") from None


def _checked(kind: type[File], written: Mapping[str, Any], where: str) -> File:
    try:
        return kind.model_validate(written)
    except ValidationError as error:
        raise ConfigError(f"{where}: {sentences(error, kind)}; correct the file") from None
