"""The page on hardware, in Markdown: `python -m kumi.config.hardware > docs/hardware.md`."""

from __future__ import annotations

from collections.abc import Iterator

from kumi.config.cluster_file import DeviceFile, HostFile, LinkFile, NetworkFile, Sourced
from kumi.config.presets import presets, read_device, read_link, read_network, read_node, toml_table
from kumi.units import format_bytes, write_bandwidth, write_duration

HEAD = """# Hardware

`[cluster]` in a run file says which machines to plan for and to train on:

```toml
[cluster]
source = "h100-sxm"       # a node below, a TOML file, or "auto" for this machine
nodes = 16
network = "roce-3200"     # what joins the nodes, where it is not what the node usually comes with
price_per_hour = 2.5      # what a device costs, if `kumi plan` is to say what a run costs
```

Machines in several places are one cluster: `sites = 2` deals the nodes evenly to two sites, and `site_link =
"optical-100g"` names what joins them (a network below that a site shares, or a file).

`source = "auto"` asks the driver for this machine's GPUs, and takes the figures of the device below that has this
name. A GPU that is not listed keeps only what the driver says of it: such a machine trains, but is not planned for. Of
CPUs the cores, their instructions and the memory are read from the system and the rest is assumed, on the low side;
`kumi bench` measures them, and writes a file for `source`.

## A file of your own

Name it as `source = "ours.toml"`. `device`, `links` and `network` may name what is listed below, or be tables of your
own with the keys of the files in `src/kumi/clusters`. A link's `span` is how many devices it joins; beyond a node's,
it joins whole nodes, as NVL72 does. Quantities have units: GB or GiB, GB/s or Gb/s, TFLOP/s, us.

```toml
device = "h100-sxm"
devices_per_node = 8
links = ["nvlink-4"]      # from the innermost to the outermost

[network]
name = "our RoCE"
per = "node"              # whose bandwidth it is: of each "device", or shared by a "node" or a "site"
bandwidth = "800 Gb/s"    # sent while as much is received
latency = "10 us"         # of one hop, for a message of no length
efficiency = 0.85         # share of the bandwidth that large collectives reach

[network.sources]
"bandwidth" = "the operator"
"latency, efficiency" = "assumed"

[host]
memory = "2 TB"           # of a node
device_bandwidth = "55 GB/s"
nvme = "30 TB"            # of a node
nvme_bandwidth = "4 GB/s" # each device's share
```

The figures of a device are those of one GPU type, wherever it is built in: a file that differs in them only is a
device of its own. What a device's table may leave out: `memory_bandwidth`, `stream` (the share of it that element-wise
kernels reach), `matmul` (the share of the peak that large products reach, by dtype, `other` for the rest),
`attention` (the same of fused attention), `processors` (that tiles are dealt to), `launch` (time from one kernel to
the next), `reserved` (memory outside the allocator), `watts`.

## What comes with kumi

This part is made from the files in `src/kumi/clusters`: `python -m kumi.config.hardware > docs/hardware.md`. Peaks are
dense, bandwidths are one way. A `*` marks what nobody measured or promised; the sources are at the end.
"""

DTYPES = ("float32", "bfloat16", "float16", "float8", "float4")


def hardware() -> str:
    """The page, made from the files."""
    parts = [HEAD, *_devices(), *_nodes(), *_links(), *_networks(), "\n### Sources\n", *_sources()]
    return "\n".join(parts) + "\n"


def _devices() -> Iterator[str]:
    """Two tables: what the data sheets say, and what is reached of it."""
    every = [(name, read_device(name)) for name in presets("devices")]
    yield "\n### Devices\n"
    yield "| device | memory | bandwidth | TFLOP/s: float32 | bfloat16 | float16 | float8 | float4 | watts |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for name, device in every:
        peaks = [f"{device.peak_flops[dtype] / 1e12:g}" if dtype in device.peak_flops else "-" for dtype in DTYPES]
        bandwidth = "-" if device.memory_bandwidth is None else write_bandwidth(device.memory_bandwidth)
        yield _row(f"`{name}`", format_bytes(device.memory), bandwidth, *peaks, device.watts)
    yield "\nWhat is reached:\n"
    yield "| device | driver's name | of the bandwidth | products: bfloat16 | float8 | attention: forward, backward |"
    yield "|---|---|---|---|---|---|"
    for name, device in every:
        reached = [_mark(device, "stream", device.stream), *_products(device), _attention(device)]
        yield _row(f"`{name}`", device.name, *reached)


def _products(device: DeviceFile) -> Iterator[str]:
    shares = device.matmul or {}
    for dtype in ("bfloat16", "float8"):
        yield _mark(device, "matmul", shares[dtype]) if dtype in shares else "-"


def _attention(device: DeviceFile) -> str:
    shares = device.attention
    return "-" if shares is None else _mark(device, "attention", f"{shares.forward:g}, {shares.backward:g}")


def _nodes() -> Iterator[str]:
    yield "\n### Nodes\n"
    yield "| node | devices | links | network | host memory | to a device | NVMe, a device |"
    yield "|---|---|---|---|---|---|---|"
    for name in presets():
        named = toml_table("nodes", name)
        devices = f"{named['devices_per_node']} `{named['device']}`"
        joined = ", ".join(f"`{link}`" for link in named["links"]) or "-"
        yield _row(f"`{name}`", devices, joined, f"`{named['network']}`", *_host(read_node(name).host))


def _links() -> Iterator[str]:
    yield "\n### Links inside a node\n"
    yield "| link | | devices | bandwidth | a hop | share |"
    yield "|---|---|---|---|---|---|"
    for name in presets("links"):
        link = read_link(name)
        yield _row(f"`{name}`", link.name, link.span, *_speeds(link))


def _speeds(link: LinkFile | NetworkFile) -> list[str]:
    return [
        _mark(link, "bandwidth", write_bandwidth(link.bandwidth)),
        _mark(link, "latency", write_duration(link.latency)),
        _mark(link, "efficiency", link.efficiency),
    ]


def _host(host: HostFile) -> list[str]:
    drives = "-"
    if host.nvme is not None and host.nvme_bandwidth is not None:
        drives = _mark(host, "nvme_bandwidth", write_bandwidth(host.nvme_bandwidth))
    return [
        "-" if host.memory is None else _mark(host, "memory", format_bytes(host.memory)),
        "-" if host.device_bandwidth is None else write_bandwidth(host.device_bandwidth),
        drives,
    ]


def _networks() -> Iterator[str]:
    yield "\n### Networks\n"
    yield "| network | | bandwidth | of a | a hop | share |"
    yield "|---|---|---|---|---|---|"
    for name in presets("networks"):
        network = read_network(name)
        bandwidth, latency, share = _speeds(network)
        yield _row(f"`{name}`", network.name, bandwidth, network.per, latency, share)


def _sources() -> Iterator[str]:
    """Every line of every `sources` table, those of one file together."""
    yield "| file | figures | from |\n|---|---|---|"
    for kind, name, part in _parts():
        for figures, text in part.sources.items():
            yield _row(f"`{kind}/{name}`", figures, text)


def _parts() -> Iterator[tuple[str, str, Sourced]]:
    yield from (("devices", name, read_device(name)) for name in presets("devices"))
    yield from (("links", name, read_link(name)) for name in presets("links"))
    yield from (("nodes", name, read_node(name).host) for name in presets())
    yield from (("networks", name, read_network(name)) for name in presets("networks"))


def _mark(part: Sourced, figure: str, value: object) -> str:
    """`value`, with a star where the source of `figure` says that it was assumed."""
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return f"{text}*" if figure in part.assumed() else text


def _row(*cells: object) -> str:
    texts = (f"{cell:g}" if isinstance(cell, float) else str(cell) for cell in cells)
    return f"| {' | '.join(texts)} |"


if __name__ == "__main__":
    print(hardware(), end="")
