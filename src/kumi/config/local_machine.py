"""This machine as a cluster: its GPUs as the driver reports them, or its CPU cores as /proc lists them."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

from kumi.config.assemble import assemble_cluster
from kumi.config.cluster_file import ASSUMED, DeviceFile, LinkFile, NetworkFile, NodeFile
from kumi.config.job_sections import ClusterSection
from kumi.config.presets import preset_names, read_device, read_network, read_node
from kumi.errors import ConfigError
from kumi.process_limits import usable_cores
from kumi.spec.cluster import ClusterSpec
from kumi.units import write_bandwidth, write_bytes, write_flops

# Assumptions about an unmeasured CPU core, conservative for a server.
# Float32 operations per cycle, with vectors of at least 256 bits and with narrower ones.
_WIDE_FLOPS, _NARROW_FLOPS = 32, 8
# Feature of the CPU -> speed of bfloat16 relative to float32.
_BFLOAT16_SPEEDUP = {"amx_bf16": 8, "avx512_bf16": 2, "bf16": 2}
_CYCLES_PER_SECOND = 2.5e9
_CORE_BANDWIDTH = 8e9  # bytes per second
# Communication between processes of one machine over gloo.
_LOOPBACK: dict[str, Any] = {"bandwidth": "1 GB/s", "latency": "50 us", "efficiency": 0.8}

# The fields to query from nvidia-smi.
_FIELDS = ("index", "uuid", "name", "memory.total", "compute_cap", "mig.mode.current")

_AnyLink = TypeVar("_AnyLink", LinkFile, NetworkFile)


def this_machine(section: ClusterSection) -> ClusterSpec:
    """Return this machine as a cluster of `section.nodes` nodes; unknown figures are assumed and marked so."""
    gpus = _gpus()
    count = section.devices_per_node or len(gpus) or 1
    return assemble_cluster(section.model_copy(update={"devices_per_node": count}), this_node(count, gpus), "auto")


def this_node(devices: int, gpus: Sequence[DeviceFile] | None = None) -> NodeFile:
    """Return this machine as a node of `devices` GPUs, or of as many shares of its CPU. `gpus`: the machine's GPUs, if
    they are listed already."""
    gpus = _gpus() if gpus is None else gpus
    return _gpu_node(gpus[0], devices) if gpus else cpu_node(devices)


def _gpu_node(gpu: DeviceFile, count: int) -> NodeFile:
    """Return a node with the device `gpu`, at least `count` times.

    The number of devices, the links, the network and the host are those of a preset with the same device and enough of
    them. Without such a preset, the node has `count` devices, and the other figures are unknown.
    """
    for name in preset_names():
        node = read_node(name)
        if node.device.name == gpu.name and node.devices_per_node >= count:
            reason = f"{ASSUMED}: this node is built like the preset {name}"
            links = tuple(_assumed(link, reason) for link in node.links)
            network = None if node.network is None else _assumed(node.network, reason)
            # The search may choose offloading, so the host memory must be this machine's own.
            host = node.host.model_copy(update={"memory": _memory()}) if node.host.memory else node.host
            return node.model_copy(update={"device": gpu, "links": links, "network": network, "host": host})
    return NodeFile(device=gpu, devices_per_node=count)


def _assumed(file: _AnyLink, reason: str) -> _AnyLink:
    """Return `file` with `reason` as the source of all its figures."""
    return file.model_copy(update={"sources": {"bandwidth, latency, efficiency": reason}})


def cpu_node(ranks: int) -> NodeFile:
    """Return this machine's cores and memory divided equally among `ranks` processes, with assumed speeds."""
    device = cpu_device(ranks)
    sources = {"bandwidth, latency, efficiency": f"{ASSUMED}: processes of one machine over gloo"}
    link = {"name": "loopback", "span": ranks, **_LOOPBACK, "sources": sources}
    network = _assumed(read_network("25gbe"), f"{ASSUMED}: 25 Gb/s Ethernet")
    return NodeFile.model_validate(
        {"device": device, "devices_per_node": ranks, "links": [link] if ranks > 1 else [], "network": network}
    )


def cpu_device(ranks: int) -> dict[str, Any]:
    """Return one of `ranks` processes on this machine's cores as a [device] table."""
    flags, dtypes = cpu_flags(), cpu_dtypes()
    cores = usable_cores() / ranks
    peak = cores * _CYCLES_PER_SECOND * (_WIDE_FLOPS if {"avx2", "avx512f", "asimd"} & flags else _NARROW_FLOPS)
    gain = max([_BFLOAT16_SPEEDUP[flag] for flag in flags & set(_BFLOAT16_SPEEDUP)], default=1)
    return {
        "name": cpu_name(),
        "kind": "cpu",
        "memory": write_bytes(_memory() // ranks),
        "dtypes": dtypes,
        "peak_flops": {"float32": write_flops(peak), "bfloat16": write_flops(peak * gain)},
        "memory_bandwidth": write_bandwidth(cores * _CORE_BANDWIDTH),
        "sources": {
            "memory, dtypes": "/proc and the container's limit",
            "peak_flops, memory_bandwidth": f"{ASSUMED}: {cores:g} cores of 2.5 GHz and 8 GB/s",
            "stream, read, matmul, attention, launch": f"{ASSUMED}: `kumi bench` measures them",
        },
    }


def threads_per_rank(nproc: int, environ: Mapping[str, str]) -> int:
    """Return the threads that each of `nproc` ranks computes with.

    This is OMP_NUM_THREADS in `environ` if it is set, else the number of cores divided by `nproc`.
    """
    threads = environ.get("OMP_NUM_THREADS", "")
    if threads.isdecimal() and int(threads) > 0:
        return int(threads)
    return max(1, usable_cores() // nproc)


def _gpus() -> list[DeviceFile]:
    """Return the CUDA devices that a program can use, as nvidia-smi lists them: to import torch would take seconds."""
    gpus = _listed_gpus()
    if gpus is None:
        _refuse_rocm()
    return [_gpu(gpu) for gpu in _visible(gpus or [], os.environ.get("CUDA_VISIBLE_DEVICES"))]


def has_gpu(name: str) -> bool:
    """Return True if this machine has a GPU of NVIDIA's that the driver calls `name`."""
    return name in {gpu["name"] for gpu in _listed_gpus() or []}


def _listed_gpus() -> list[dict[str, str]] | None:
    """Return `_FIELDS` of each GPU that nvidia-smi lists; None without nvidia-smi or if it fails."""
    query = ["nvidia-smi", f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        listed = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    rows = [[part.strip() for part in line.split(",")] for line in listed.strip().splitlines()]
    return [dict(zip(_FIELDS, row, strict=True)) for row in rows]


def _refuse_rocm() -> None:
    """Raise ConfigError if PyTorch was built for AMD's GPUs, which nvidia-smi does not list."""
    try:
        built = version("torch")
    except PackageNotFoundError:
        return
    if "rocm" in built and os.environ.get("HIP_VISIBLE_DEVICES", "0"):
        raise ConfigError(
            f"cluster.source='auto': torch {built} is for AMD's GPUs, which kumi cannot list; set cluster.source to a "
            f"file that describes them, such as one with the preset 'mi300x' (docs/hardware.md), or set the variable "
            f"HIP_VISIBLE_DEVICES to nothing, to use the CPU"
        )


def exclusive_gpu() -> bool:
    """Return True if a GPU of this machine takes one process at a time, or none: in exclusive compute mode."""
    query = ["nvidia-smi", "--query-gpu=compute_mode", "--format=csv,noheader"]
    try:
        listed = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return False
    return any(line.strip() not in ("Default", "") for line in listed.splitlines())


def _visible(gpus: list[dict[str, str]], names: str | None) -> list[dict[str, str]]:
    """Return the GPUs among `gpus` that CUDA_VISIBLE_DEVICES = `names` selects, in that order; all if `names` is None.

    `names` has numbers or prefixes of UUIDs. As in CUDA, the first entry that matches no GPU, or a GPU already
    selected, ends the list. Raise ConfigError for a partition of a GPU (MIG), since its memory and speed differ.
    """
    chosen: list[dict[str, str]] = []
    for name in [gpu["index"] for gpu in gpus] if names is None else names.split(","):
        name = name.strip()
        matches = [gpu for gpu in gpus if gpu["index"] == name or (name[:4] == "GPU-" and gpu["uuid"].startswith(name))]
        if name.startswith("MIG-") or any(gpu["mig.mode.current"] == "Enabled" for gpu in matches):
            raise ConfigError(
                f"cluster.source='auto': GPU {name!r} is partitioned by MIG, and the driver does not report the speed "
                f"of a partition; describe one in a file (docs/hardware.md), and set cluster.source to it"
            )
        if len(matches) != 1 or matches[0] in chosen:
            break
        chosen += matches
    return chosen


def _gpu(gpu: dict[str, str]) -> DeviceFile:
    """Return a GPU that nvidia-smi lists, with the figures of the preset of the same name if there is one."""
    name, mebibytes, capability = gpu["name"], gpu["memory.total"], gpu["compute_cap"]
    memory = {"memory": f"{mebibytes} MiB"}
    for preset in preset_names("devices"):
        device = read_device(preset)
        if device.name == name:
            return device.model_copy(update={"memory": int(mebibytes) * 2**20})
    dtypes = ("float32", "bfloat16", "float16") if float(capability) >= 8.0 else ("float32", "float16")
    if float(capability) >= 8.9:
        dtypes = (*dtypes, "float8")
    return DeviceFile.model_validate({"name": name, "kind": "cuda", "dtypes": dtypes, **memory})


def cpu_name() -> str:
    """Return the model name of the CPU."""
    for line in _cpuinfo():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def cpu_dtypes() -> tuple[str, ...]:
    """Return the dtypes that the CPU computes fast: bfloat16 if it has instructions for its matmuls, never float16."""
    return ("float32", "bfloat16") if set(_BFLOAT16_SPEEDUP) & cpu_flags() else ("float32",)


def cpu_flags() -> set[str]:
    """Return the features of the CPU as /proc/cpuinfo names them."""
    line = next((line for line in _cpuinfo() if line.startswith(("flags", "Features"))), "")
    return set(line.split())


def _cpuinfo() -> list[str]:
    file = Path("/proc/cpuinfo")
    return file.read_text().splitlines() if file.exists() else []


def _memory() -> int:
    """Return the bytes of memory of this machine, or of this process's container."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.exists() else "max"
    return min(total, int(text)) if text.isdigit() else total
