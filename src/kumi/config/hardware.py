"""Generate docs/hardware.md: `python -m kumi.config.hardware > docs/hardware.md`."""

from __future__ import annotations

from collections.abc import Iterator

from kumi.config.cluster_file import DeviceFile, HostFile, LinkFile, NetworkFile, SourcedFigures
from kumi.config.presets import preset_names, read_device, read_link, read_machine_toml, read_network, read_node
from kumi.units import format_bytes, write_bandwidth, write_duration

_HEAD = """# Hardware

The section [cluster] of a run file describes the machines:

```toml
[cluster]
source = "h100-sxm"       # a node below, a TOML file, or "auto" for this machine
nodes = 16
network = "roce-3200"     # the network between the nodes, if it is not the node's usual one
price_per_hour = 2.5      # the price of a device; `kumi plan` then reports the cost of a run
```

A cluster may span several sites: `sites = 2` distributes the nodes evenly over two sites, and `site_link =
"optical-100g"` names the network between them (a network below that is shared by a site, or a file).

With `source = "auto"`, kumi asks the driver for this machine's GPUs and takes their figures from the device below with
the same name. For a GPU that is not listed, only the driver's figures are known: the machine can train, but `kumi plan`
cannot estimate its speed. For a CPU, cores, instruction sets and memory are read from the system, and the other figures
are conservative assumptions; `kumi bench` measures them and writes a file for `source`.

## A file of your own

Name it as `source = "ours.toml"`. `device`, `links` and `network` are names from the tables below, or tables of your
own with the keys of the files in `src/kumi/clusters`. The `span` of a link is the number of devices that it connects; a
span larger than a node covers several nodes, as NVL72 does. Quantities have units: GB or GiB, GB/s or Gb/s, TFLOP/s,
us.

```toml
device = "h100-sxm"
devices_per_node = 8
links = ["nvlink-4"]      # from the innermost to the outermost

[network]
name = "our RoCE"
per = "node"              # the bandwidth of each "device", or shared by a "node" or a "site"
bandwidth = "800 Gb/s"    # in one direction
latency = "10 us"         # of one hop, for an empty message
efficiency = 0.85         # the share of the bandwidth that large collectives reach

[network.sources]
"bandwidth" = "the operator"
"latency, efficiency" = "assumed"

[host]
memory = "2 TB"           # of a node
device_bandwidth = "55 GB/s"
nvme = "30 TB"            # of a node
nvme_bandwidth = "4 GB/s" # per device
```

A device describes one type of GPU, in any machine. Optional keys of a device: `memory_bandwidth`, `stream` (the share
of it that element-wise kernels reach), `read` (the share of it at which matmuls of few rows read their weights, by
dtype, for plans of generation), `matmul` (the share of the peak that large matmuls reach, by dtype, `other` for
the remaining dtypes), `attention` (the share of the peak that fused attention reaches in long documents; each entry of
its list `by_length` has a document's length in `tokens`, and the speeds `forward` and `backward` at this length,
relative to those in long documents), `processors` (multiprocessors, over which a matmul's tiles are distributed),
`launch` (the time between two kernel launches), `reserved` (memory outside the allocator), `watts`.

## What comes with kumi

This part is generated from the files in `src/kumi/clusters`: `python -m kumi.config.hardware > docs/hardware.md`. Peaks
are dense, bandwidths are in one direction. A `*` marks an assumption: neither measured nor in a data sheet. The sources
are at the end.
"""

_DTYPES = ("float32", "bfloat16", "float16", "float8", "float4")


def hardware_page() -> str:
    """Return the page in Markdown."""
    parts = [_HEAD, *_devices(), *_nodes(), *_links(), *_networks(), "\n### Sources\n", *_sources()]
    return "\n".join(parts) + "\n"


def _devices() -> Iterator[str]:
    """Yield two tables: the figures of data sheets, and the shares of them that kernels reach."""
    devices = [(name, read_device(name)) for name in preset_names("devices")]
    yield "\n### Devices\n"
    yield "| device | memory | bandwidth | TFLOP/s: float32 | bfloat16 | float16 | float8 | float4 | watts |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for name, device in devices:
        peaks = [f"{device.peak_flops[dtype] / 1e12:g}" if dtype in device.peak_flops else "-" for dtype in _DTYPES]
        bandwidth = "-" if device.memory_bandwidth is None else write_bandwidth(device.memory_bandwidth)
        yield _row(f"`{name}`", format_bytes(device.memory), bandwidth, *peaks, device.watts)
    yield "\nShares of bandwidth and peak that kernels reach:\n"
    yield "| device | driver's name | bandwidth | matmuls: bfloat16 | float8 | attention: forward, backward |"
    yield "|---|---|---|---|---|---|"
    for name, device in devices:
        reached = [_mark(device, "stream", device.stream), *_matmuls(device), _attention(device)]
        yield _row(f"`{name}`", device.name, *reached)


def _matmuls(device: DeviceFile) -> Iterator[str]:
    shares = device.matmul or {}
    for dtype in ("bfloat16", "float8"):
        yield _mark(device, "matmul", shares[dtype]) if dtype in shares else "-"


def _attention(device: DeviceFile) -> str:
    shares = device.attention
    return "-" if shares is None else _mark(device, "attention", f"{shares.forward:g}, {shares.backward:g}")


def _nodes() -> Iterator[str]:
    yield "\n### Nodes\n"
    yield "| node | devices | links | network | host memory | host to a device | NVMe per device |"
    yield "|---|---|---|---|---|---|---|"
    for name in preset_names():
        named = read_machine_toml("nodes", name)
        devices = f"{named['devices_per_node']} `{named['device']}`"
        links = ", ".join(f"`{link}`" for link in named["links"]) or "-"
        yield _row(f"`{name}`", devices, links, f"`{named['network']}`", *_host(read_node(name).host))


def _links() -> Iterator[str]:
    yield "\n### Links inside a node\n"
    yield "| link | | devices | bandwidth | latency per hop | efficiency |"
    yield "|---|---|---|---|---|---|"
    for name in preset_names("links"):
        link = read_link(name)
        yield _row(f"`{name}`", link.name, link.span, *_speeds(link))


def _speeds(link: LinkFile | NetworkFile) -> list[str]:
    """Return the cells of bandwidth, latency and efficiency."""
    return [
        _mark(link, "bandwidth", write_bandwidth(link.bandwidth)),
        _mark(link, "latency", write_duration(link.latency)),
        _mark(link, "efficiency", link.efficiency),
    ]


def _host(host: HostFile) -> list[str]:
    """Return the cells of the host's memory, its bandwidth to a device, and its drives."""
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
    yield "| network | | bandwidth | per | latency per hop | efficiency |"
    yield "|---|---|---|---|---|---|"
    for name in preset_names("networks"):
        network = read_network(name)
        bandwidth, latency, share = _speeds(network)
        yield _row(f"`{name}`", network.name, bandwidth, network.per, latency, share)


def _sources() -> Iterator[str]:
    """Yield one row per entry of each `sources` table."""
    yield "| file | figures | source |\n|---|---|---|"
    for kind, name, part in _parts():
        for figures, text in part.sources.items():
            yield _row(f"`{kind}/{name}`", figures, text)


def _parts() -> Iterator[tuple[str, str, SourcedFigures]]:
    """Yield the kind and the name of each preset, and its table with sources."""
    yield from (("devices", name, read_device(name)) for name in preset_names("devices"))
    yield from (("links", name, read_link(name)) for name in preset_names("links"))
    yield from (("nodes", name, read_node(name).host) for name in preset_names())
    yield from (("networks", name, read_network(name)) for name in preset_names("networks"))


def _mark(part: SourcedFigures, figure: str, value: object) -> str:
    """Return `value` as text, with a star if `figure` is an assumption."""
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return f"{text}*" if figure in part.assumed() else text


def _row(*cells: object) -> str:
    texts = (f"{cell:g}" if isinstance(cell, float) else str(cell) for cell in cells)
    return f"| {' | '.join(texts)} |"


if __name__ == "__main__":
    print(hardware_page(), end="")
