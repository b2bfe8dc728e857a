"""The machines: devices, how many in a node, how many nodes."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class Device:
    """One accelerator, or one CPU process's share of a machine.

    `memory` in bytes; `peak` is the data sheet's dense FLOP/s for each dtype as pairs, empty where unknown;
    `dtypes` are those it computes fast. `kind` is "cuda" or "cpu".
    """

    name: str
    kind: str
    memory: int
    dtypes: tuple[str, ...] = ("float32",)
    peak: tuple[tuple[str, float], ...] = ()

    def peak_flops(self, dtype: str) -> float | None:
        """Peak FLOP/s in `dtype`, or None where it is not known."""
        return MappingProxyType(dict(self.peak)).get(dtype)


@dataclass(frozen=True)
class ClusterSpec:
    """`nodes` machines with `devices_per_node` equal devices each. `source` says where this description came from."""

    source: str
    device: Device
    devices_per_node: int
    nodes: int = 1

    @property
    def devices(self) -> int:
        return self.nodes * self.devices_per_node
