"""The cluster: devices, nodes and sites, and the links between them."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from types import MappingProxyType


@dataclass(frozen=True)
class Device:
    """One accelerator, or the cores and memory of one CPU process.

    The fractions that kernels reach (`stream`, `read`, `matmul`, `attention`) and `launch` are measured or assumed.

    - `kind`: "cuda", PyTorch's name of GPUs of NVIDIA and AMD, or "cpu".
    - `memory`: bytes.
    - `dtypes`: the dtypes that it computes fast.
    - `peak`: (dtype, dense FLOP/s of the data sheet) pairs; empty if unknown.
    - `memory_bandwidth`: bytes/s of its memory; 0 if unknown.
    - `stream`: fraction of `memory_bandwidth` that element-wise kernels reach.
    - `read`: (dtype, fraction of `memory_bandwidth` at which matmuls of few rows read their weights, as in generation)
      pairs; empty if not measured.
    - `matmul`: (dtype, fraction of the peak that large matmuls reach) pairs; "" for all other dtypes.
    - `attention`: fractions of the peak that fused attention reaches in long documents, forward and backward.
    - `attention_lengths`: (tokens, forward, backward) in increasing order of tokens: the speed of attention in
      documents of this length, relative to `attention`; empty if it is not measured.
    - `processors`: streaming multiprocessors, over which the tiles of a kernel are distributed; 0 if unknown.
    - `launch`: seconds between two kernels if the host is the bottleneck.
    - `reserved`: bytes that the CUDA context and the communication library use outside of the allocator.
    - `price`: price per hour; 0 if unknown.
    - `watts`: power at full load; 0 if unknown.
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
    attention_lengths: tuple[tuple[int, float, float], ...] = ()
    processors: int = 0
    launch: float = 5e-6
    reserved: int = 0
    price: float = 0.0
    watts: float = 0.0
    read: tuple[tuple[str, float], ...] = ()

    @property
    def is_gpu(self) -> bool:
        """True for GPUs, of NVIDIA or AMD."""
        return self.kind == "cuda"

    def peak_flops(self, dtype: str) -> float | None:
        """Return the peak FLOP/s in `dtype`, or None if unknown."""
        return MappingProxyType(dict(self.peak)).get(dtype)

    def matmul_share(self, dtype: str) -> float:
        """Return the fraction of the peak that large matmuls in `dtype` reach."""
        shares = dict(self.matmul)
        return shares.get(dtype, shares.get("", 0.7))


@dataclass(frozen=True)
class Link:
    """A kind of link that connects the devices within each block of `span` consecutive devices.

    - `bandwidth`: bytes/s that each device sends, and receives, while all devices do (the devices of a node share its
      network cards).
    - `latency`: seconds for an empty message to the next device.
    - `efficiency`: fraction of the bandwidth that large collectives reach.
    """

    name: str
    span: int
    bandwidth: float
    latency: float
    efficiency: float = 0.8


@dataclass(frozen=True)
class Host:
    """The host of a node; a figure is 0 if it is unknown.

    - `memory`: bytes.
    - `device_bandwidth`: bytes/s between the host and each device.
    - `nvme_bandwidth`: bytes/s of the NVMe drives for each device, if all devices use them.
    - `nvme`: bytes of all NVMe drives of the node.
    """

    memory: int = 0
    device_bandwidth: float = 0.0
    nvme_bandwidth: float = 0.0
    nvme: int = 0


@dataclass(frozen=True)
class MachineRuns:
    """Runs on the machines of a cluster, to which the machines' figures were refitted (`kumi plan --calibrate`).

    - `runs`: the number of runs.
    - `time_ratio`, `memory_ratio`: measured / estimated with the refitted figures, the geometric mean of the runs.
    """

    runs: int
    time_ratio: float
    memory_ratio: float


@dataclass(frozen=True)
class ClusterSpec:
    """`nodes` machines with `devices_per_node` devices of one type each, evenly distributed over `sites`.

    - `source`: origin of this description.
    - `links`: from the innermost (inside a node) to the outermost (between sites); empty if unknown.
    - `assumed`: names of figures that are neither measured nor in a data sheet ("device.launch", "NVLink 3: latency").
    - `measured`: the runs to which the figures were refitted; None if there were no such runs.
    """

    source: str
    device: Device
    devices_per_node: int
    nodes: int = 1
    sites: int = 1
    links: tuple[Link, ...] = ()
    host: Host = Host()
    assumed: tuple[str, ...] = ()
    measured: MachineRuns | None = None

    @property
    def devices(self) -> int:
        return self.nodes * self.devices_per_node

    def level(self, stride: int, degree: int) -> int:
        """Return the index in `links` of the slowest link inside a group of `degree` ranks, each `stride` ranks from
        the next."""
        for index, link in enumerate(self.links):
            if ranks_within(stride, degree, link.span) >= degree:
                return index
        return len(self.links) - 1


def ranks_within(stride: int, degree: int, span: int) -> int:
    """Return how many of a group's `degree` ranks, each `stride` ranks from the next, share an aligned block of `span`
    ranks."""
    if stride >= span:
        return 1
    inside = span // stride if span % stride == 0 else gcd(span, stride * degree) // stride
    return max(1, min(degree, inside))
