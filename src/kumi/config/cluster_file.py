"""What a TOML file about machines may say: a node with its device and its links, or a network between nodes.

Figures carry units ("80 GiB", "3.35 TB/s", "400 Gb/s", "25 us"). Every part has a `sources` table, whose keys name one
figure or several, and whose values say where these came from; what begins with "assumed" nobody measured or promised.

    device = "h100-sxm"          a device that comes with kumi, or a [device] table (DeviceFile)
    devices_per_node = 8
    links = ["nvlink-4"]         what joins them, innermost first: links that come with kumi, or [[links]] (LinkFile)
    network = "ib-ndr"           what joins such nodes unless the run file says otherwise, or [network] (NetworkFile)
    [host] memory = "2 TiB", device_bandwidth = "50 GB/s"                                                  (HostFile)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from kumi.config.schema import Number, Positive, Section, Text
from kumi.errors import ConfigError
from kumi.units import parse_bandwidth, parse_bytes, parse_duration, parse_flops

ASSUMED = "assumed"


def _quantity(parse: Callable[[str], float]) -> BeforeValidator:
    """Reads text with a unit into base units; a bare number is refused, as nobody can tell what it counts."""

    def read(value: Any) -> float:
        try:
            return parse(value if isinstance(value, str) else repr(value))
        except ConfigError as error:
            raise ValueError(str(error)) from None

    return BeforeValidator(read)


Bytes = Annotated[int, Field(gt=0), _quantity(parse_bytes)]
Bandwidth = Annotated[float, Field(gt=0), _quantity(parse_bandwidth)]
Flops = Annotated[float, Field(gt=0), _quantity(parse_flops)]
Seconds = Annotated[float, Field(ge=0), _quantity(parse_duration)]
Share = Annotated[Number, Field(gt=0, le=1)]
Dtype = Literal["float64", "float32", "bfloat16", "float16", "float8", "float4"]


class Sourced(Section):
    """Figures with a table of where they came from."""

    sources: dict[str, Text] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _of_known_figures(self) -> Sourced:
        known = sorted(set(type(self).model_fields) - {"sources"})
        for name in self.sourced():
            if name not in known:
                close = get_close_matches(name, known, n=1)
                hint = f"did you mean {close[0]!r}?" if close else f"known here: {', '.join(known)}"
                raise ValueError(f"sources: {name!r} is no figure of this table; {hint}")
        return self

    def sourced(self) -> dict[str, str]:
        """Where each figure came from."""
        return {name.strip(): text for names, text in self.sources.items() for name in names.split(",")}

    def assumed(self) -> list[str]:
        """The figures whose source says that they were assumed."""
        return [name for name, text in self.sourced().items() if text.startswith(ASSUMED)]


class AttentionFile(Section):
    """Shares of the peak that fused attention reaches."""

    forward: Share
    backward: Share


class DeviceFile(Sourced):
    """One accelerator, as `kumi.spec.cluster.Device` has it; what is left out takes the default from there.

    `name` is the driver's, so that a machine can be recognised by it. `matmul` is by dtype, "other" for the rest.
    """

    name: Text
    kind: Literal["cpu", "cuda"]
    memory: Bytes
    dtypes: Annotated[tuple[Dtype, ...], Field(min_length=1)]
    peak_flops: dict[Dtype, Flops] = Field(default_factory=dict)
    memory_bandwidth: Bandwidth | None = None
    stream: Share | None = None
    matmul: dict[Dtype | Literal["other"], Share] | None = None
    attention: AttentionFile | None = None
    processors: Positive | None = None
    launch: Seconds | None = None
    reserved: Annotated[int, Field(ge=0), _quantity(parse_bytes)] | None = None
    watts: Annotated[Number, Field(ge=0)] | None = None


class LinkFile(Sourced):
    """What joins `span` consecutive devices: bytes/s that each sends, the time of a hop, the share collectives reach.

    A span beyond the node's devices is a domain of several nodes, such as NVL72.
    """

    name: Text
    span: Positive
    bandwidth: Bandwidth
    latency: Seconds
    efficiency: Share


class NetworkFile(Sourced):
    """What joins nodes or sites: `bandwidth` of every device's own card, or of what a node or a site shares."""

    name: Text
    per: Literal["device", "node", "site"]
    bandwidth: Bandwidth
    latency: Seconds
    efficiency: Share


class HostFile(Sourced):
    """The host side of a node; what is left out is not known."""

    memory: Bytes | None = None
    device_bandwidth: Bandwidth | None = None
    nvme_bandwidth: Bandwidth | None = None
    nvme: Bytes | None = None


class NodeFile(Sourced):
    """A kind of machine: its devices, what joins them, its host, and the network it is usually bought with."""

    device: DeviceFile
    devices_per_node: Positive
    links: tuple[LinkFile, ...] = ()
    host: HostFile = HostFile()
    network: NetworkFile | None = None

    @model_validator(mode="after")
    def _links_cover_the_node(self) -> NodeFile:
        spans = [link.span for link in self.links]
        if spans != sorted(set(spans)):
            raise ValueError(f"links: spans {spans} must grow from the innermost link to the outermost")
        if self.devices_per_node > 1 and spans and spans[-1] < self.devices_per_node:
            raise ValueError(
                f"links: the outermost spans {spans[-1]} devices, and a node has {self.devices_per_node}; "
                f"describe what joins them all"
            )
        beyond = [span for span in spans if span > self.devices_per_node and span % self.devices_per_node]
        if beyond:
            raise ValueError(
                f"links: a span of {beyond[0]} is no whole number of nodes of {self.devices_per_node}; use a multiple"
            )
        return self


def given(file: Section, names: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What `file` says, without its sources and what it leaves out."""
    return {name: value for name, value in file.model_dump(exclude={"sources"}).items() if value is not None} | dict(
        names or {}
    )
