"""TOML files that describe machines: a node with its device and its links, or a network between nodes.

Quantities have units ("80 GiB", "3.35 TB/s", "400 Gb/s", "25 us"). Every table may have a `sources` table: each key
names one or more figures, separated by commas, and its value is the source of these figures. A value that begins with
"assumed" marks a figure that is neither measured nor in a data sheet.

    device = "h100-sxm"          a device preset, or a [device] table (DeviceFile)
    devices_per_node = 8
    links = ["nvlink-4"]         links between the devices, innermost first: presets, or [[links]] tables (LinkFile)
    network = "ib-ndr"           default network between such nodes: a preset, or a [network] table (NetworkFile)
    [host]                       the machine around the devices (HostFile)
    memory = "2 TiB"
    [measured]                   the runs with which `kumi plan --calibrate` corrected these figures (MeasuredFile)
    runs = 2
"""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from kumi.config.section import Number, Positive, Section, Text
from kumi.errors import ConfigError
from kumi.units import parse_bandwidth, parse_bytes, parse_duration, parse_flops

ASSUMED = "assumed"  # the beginning of the source of an assumed figure


def _quantity(parse: Callable[[str], float]) -> BeforeValidator:
    """Return a validator that converts text with a unit to base units. `parse` refuses bare numbers as ambiguous."""

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


class SourcedFigures(Section):
    """A table of figures with their sources."""

    sources: dict[str, Text] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check_sourced_names(self) -> SourcedFigures:
        """Refuse sources of figures that the table does not have."""
        figures = sorted(set(type(self).model_fields) - {"sources"})
        for name in self.sourced():
            if name not in figures:
                close = get_close_matches(name, figures, n=1)
                hint = f"did you mean {close[0]!r}?" if close else f"valid figures: {', '.join(figures)}"
                raise ValueError(f"sources: {name!r} is not a figure of this table; {hint}")
        return self

    def sourced(self) -> dict[str, str]:
        """Return the source of each figure."""
        return {name.strip(): text for names, text in self.sources.items() for name in names.split(",")}

    def assumed(self) -> list[str]:
        """Return the figures that are assumptions."""
        return [name for name, text in self.sourced().items() if text.startswith(ASSUMED)]


class AttentionLengthFile(Section):
    """The speed of fused attention in documents of length `tokens`, relative to its speed in long documents."""

    tokens: Positive
    forward: Annotated[Number, Field(gt=0)]
    backward: Annotated[Number, Field(gt=0)]


class AttentionFile(Section):
    """The shares of peak FLOP/s that fused attention reaches in long documents, and its speed by length if measured."""

    forward: Share
    backward: Share
    by_length: tuple[AttentionLengthFile, ...] = ()

    @model_validator(mode="after")
    def _check_lengths(self) -> AttentionFile:
        """Refuse lengths that do not increase."""
        lengths = [item.tokens for item in self.by_length]
        if lengths != sorted(set(lengths)):
            raise ValueError(f"by_length: tokens {lengths} do not increase; list the lengths from the shortest on")
        return self


class DeviceFile(SourcedFigures):
    """One accelerator, as in `kumi.spec.cluster.Device`; missing figures have the defaults of that class.

    `name` is the name that the driver reports, by which a machine is recognised. `matmul` has shares of the peak by
    dtype, "other" for the remaining dtypes. `stream` is the share of `memory_bandwidth` that element-wise operations
    reach, and `read` the share that a decode step reaches while it reads weights, by dtype. `processors` is the number
    of multiprocessors, `launch` the time between two kernels if the host is the bottleneck, `reserved` the memory
    outside of PyTorch's allocator, and `watts` the power at full load.
    """

    name: Text = Field(examples=["NVIDIA H100 80GB HBM3"])
    kind: Literal["cpu", "cuda"] = Field(examples=["cuda"])
    memory: Bytes = Field(examples=["80 GiB"])
    dtypes: Annotated[tuple[Dtype, ...], Field(min_length=1)] = Field(examples=[["float32", "bfloat16"]])
    peak_flops: dict[Dtype, Flops] = Field(default_factory=dict)
    memory_bandwidth: Bandwidth | None = None
    stream: Share | None = None
    read: dict[Dtype, Share] | None = None
    matmul: dict[Dtype | Literal["other"], Share] | None = None
    attention: AttentionFile | None = None
    processors: Positive | None = None
    launch: Seconds | None = None
    reserved: Annotated[int, Field(ge=0), _quantity(parse_bytes)] | None = None
    watts: Annotated[Number, Field(ge=0)] | None = None


class LinkFile(SourcedFigures):
    """A link between `span` consecutive devices.

    `bandwidth`: bytes/s that each device sends.
    `latency`: seconds per hop.
    `efficiency`: the share of the bandwidth that large collectives reach.

    A `span` larger than a node describes a domain of several nodes, such as NVL72.
    """

    name: Text = Field(examples=["NVLink 4"])
    span: Positive = Field(examples=[8])
    bandwidth: Bandwidth = Field(examples=["450 GB/s"])
    latency: Seconds = Field(examples=["2 us"])
    efficiency: Share = Field(examples=[0.8])


class NetworkFile(SourcedFigures):
    """A network between nodes or sites.

    `bandwidth`: bytes/s in one direction that each device has (`per` = "device"), or that all devices of a node or of a
    site share.
    """

    name: Text = Field(examples=["InfiniBand NDR"])
    per: Literal["device", "node", "site"] = Field(examples=["device"])
    bandwidth: Bandwidth = Field(examples=["400 Gb/s"])
    latency: Seconds = Field(examples=["5 us"])
    efficiency: Share = Field(examples=[0.8])


class HostFile(SourcedFigures):
    """The host of a node; missing figures are unknown.

    `device_bandwidth`: bytes/s between the host's memory and one device. `nvme_bandwidth`: bytes/s of the NVMe drives
    for each device. `memory` and `nvme`: bytes of a node.
    """

    memory: Bytes | None = None
    device_bandwidth: Bandwidth | None = None
    nvme_bandwidth: Bandwidth | None = None
    nvme: Bytes | None = None


class MeasuredFile(Section):
    """The runs to which figures were refitted, as in `kumi.spec.cluster.MachineRuns`.

    `runs`: the number of runs. `time_ratio`, `memory_ratio`: measured / estimated with the refitted figures, averaged
    over the runs.
    """

    runs: Positive
    time_ratio: Annotated[Number, Field(gt=0)]
    memory_ratio: Annotated[Number, Field(gt=0)]


class NodeFile(SourcedFigures):
    """A kind of machine: its devices, the links between them, its host, and its usual network."""

    device: DeviceFile = Field(examples=["h100-sxm"])
    devices_per_node: Positive = Field(examples=[8])
    links: tuple[LinkFile, ...] = ()
    host: HostFile = HostFile()
    network: NetworkFile | None = None
    measured: MeasuredFile | None = None

    @model_validator(mode="after")
    def _check_spans(self) -> NodeFile:
        """Refuse spans of links that do not increase, or do not fit the number of devices of a node."""
        spans = [link.span for link in self.links]
        if spans != sorted(set(spans)):
            raise ValueError(f"links: spans {spans} do not increase; list the links from the innermost outwards")
        if self.devices_per_node > 1 and spans and spans[-1] < self.devices_per_node:
            raise ValueError(
                f"links: the outermost link spans {spans[-1]} devices, but a node has {self.devices_per_node}; "
                f"describe a link that spans them all"
            )
        beyond = [span for span in spans if span > self.devices_per_node and span % self.devices_per_node]
        if beyond:
            raise ValueError(
                f"links: a span of {beyond[0]} is not a multiple of devices_per_node={self.devices_per_node}; use a "
                f"multiple, or at most devices_per_node"
            )
        return self


def given_fields(file: Section) -> dict[str, Any]:
    """Return the figures that `file` sets, without its sources."""
    return {name: value for name, value in file.model_dump(exclude={"sources"}).items() if value is not None}
