"""The machines: devices, how many in a node, how many nodes and sites, and what joins them."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from types import MappingProxyType


@dataclass(frozen=True)
class Device:
    """One accelerator, or one CPU process's share of a machine.

    `memory` in bytes; `peak` is the data sheet's dense FLOP/s for each dtype as pairs, empty where unknown; `dtypes`
    are those it computes fast. `kind` is "cuda" or "cpu". What follows is what was measured of it, and is 0 where
    nothing is known: `memory_bandwidth` bytes/s of its own memory, and the share of it that element-wise kernels reach
    (`stream`); the share of the peak that large matrix products reach (`matmul`, pairs by dtype, "" for all others)
    and that fused attention reaches going forward and backward (`attention`); `processors`, the units a kernel's tiles
    are dealt to; `launch`, seconds from one kernel to the next when the host cannot go faster; `reserved`, bytes that
    the context and the communication library hold outside the allocator. `price` is per hour, `watts` at full load.
    """

    name: str
    kind: str
    memory: int
    dtypes: tuple[str, ...] = ("float32",)
    peak: tuple[tuple[str, float], ...] = ()
    memory_bandwidth: float = 0.0
    stream: float = 0.8
    matmul: tuple[tuple[str, float], ...] = (("", 0.7),)
    attention: tuple[float, float] = (0.5, 0.4)
    processors: int = 0
    launch: float = 5e-6
    reserved: int = 0
    price: float = 0.0
    watts: float = 0.0

    def peak_flops(self, dtype: str) -> float | None:
        """Peak FLOP/s in `dtype`, or None where it is not known."""
        return MappingProxyType(dict(self.peak)).get(dtype)

    def matmul_share(self, dtype: str) -> float:
        """Share of the peak that large matrix products in `dtype` reach."""
        shares = dict(self.matmul)
        return shares.get(dtype, shares.get("", 0.7))


@dataclass(frozen=True)
class Link:
    """What joins devices: `span` consecutive devices are joined by it.

    `bandwidth` is bytes/s that each device can send while it receives as much, when all devices do (a node's network
    cards are shared by its devices); `latency` is seconds for a message of no length to the next device. `efficiency`
    is the share of the bandwidth that large collectives reach.
    """

    name: str
    span: int
    bandwidth: float
    latency: float
    efficiency: float = 0.8


@dataclass(frozen=True)
class Host:
    """The host side of a node: `memory` bytes, bytes/s between it and each device, each device's share of the NVMe
    drives' bytes/s, and `nvme` bytes on all of the node's drives. 0 where nothing is known."""

    memory: int = 0
    device_bandwidth: float = 0.0
    nvme_bandwidth: float = 0.0
    nvme: int = 0


@dataclass(frozen=True)
class ClusterSpec:
    """`nodes` machines with `devices_per_node` equal devices each, dealt evenly to `sites`.

    `links` go from the innermost (inside a node) to the outermost (between sites); empty where nothing is known of
    them. `source` says where this description came from, and `assumed` which of its figures nobody measured or promised
    ("device.launch", "NVLink 3: latency").
    """

    source: str
    device: Device
    devices_per_node: int
    nodes: int = 1
    sites: int = 1
    links: tuple[Link, ...] = ()
    host: Host = Host()
    assumed: tuple[str, ...] = ()

    @property
    def devices(self) -> int:
        return self.nodes * self.devices_per_node

    def level(self, stride: int, degree: int) -> int:
        """Index in `links` of the slowest link inside a group of `degree` ranks that stand `stride` apart."""
        for index, link in enumerate(self.links):
            if members_inside(stride, degree, link.span) >= degree:
                return index
        return len(self.links) - 1


def members_inside(stride: int, degree: int, span: int) -> int:
    """How many of a group's `degree` ranks, `stride` apart, share an aligned block of `span` ranks."""
    if stride >= span:
        return 1
    inside = span // stride if span % stride == 0 else gcd(span, stride * degree) // stride
    return max(1, min(degree, inside))
