"""This machine: its GPUs as the driver names them, or its CPU cores as /proc lists them."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from kumi.config.assemble import assemble
from kumi.config.cluster_file import ASSUMED, DeviceFile, LinkFile, NetworkFile, NodeFile
from kumi.config.presets import presets, read_device, read_network, read_node
from kumi.config.schema import ClusterSection
from kumi.errors import ConfigError
from kumi.spec.cluster import ClusterSpec
from kumi.units import write_bandwidth, write_bytes, write_flops

# What a CPU core is taken to do where nobody measured it, on the low side of what servers do: float32 operations a
# cycle with 256-bit and with narrower vectors, how much faster bfloat16 is, cycles a second, bytes a second.
WIDE, NARROW = 32, 8
BFLOAT16_GAIN = {"amx_bf16": 8, "avx512_bf16": 2, "bf16": 2}
CYCLES = 2.5e9
CORE_BANDWIDTH = 8e9
# Between processes of one machine, over gloo.
LOOPBACK: dict[str, Any] = {"bandwidth": "1 GB/s", "latency": "50 us", "efficiency": 0.8}

# What nvidia-smi is asked about every GPU.
_FIELDS = ("index", "uuid", "name", "memory.total", "compute_cap", "mig.mode.current")

Kind = TypeVar("Kind", LinkFile, NetworkFile)


def this_machine(section: ClusterSection) -> ClusterSpec:
    """The machine this runs on, `section.nodes` times; figures that are not known here are assumed and said to be."""
    gpus = _gpus()
    if not gpus:
        ranks = section.devices_per_node or 1
        return assemble(section, cpu_node(ranks), "auto")
    count = section.devices_per_node or len(gpus)
    return assemble(section.model_copy(update={"devices_per_node": count}), gpu_node(gpus[0], count), "auto")


def gpu_node(gpu: DeviceFile, count: int) -> NodeFile:
    """A node of `count` devices like `gpu`, joined as in the preset that has them, or else by nothing that is known."""
    for name in presets():
        node = read_node(name)
        if node.device.name == gpu.name and node.devices_per_node >= count:
            said = f"{ASSUMED}: this node is built like the preset {name}"
            links = tuple(_assumed(link, said) for link in node.links)
            network = None if node.network is None else _assumed(node.network, said)
            # The search may choose to offload, so that the memory must be this machine's own.
            host = node.host.model_copy(update={"memory": _memory()}) if node.host.memory else node.host
            return node.model_copy(update={"device": gpu, "links": links, "network": network, "host": host})
    return NodeFile(device=gpu, devices_per_node=count)


def _assumed(file: Kind, said: str) -> Kind:
    return file.model_copy(update={"sources": {"bandwidth, latency, efficiency": said}})


def cpu_node(ranks: int) -> NodeFile:
    """This machine's cores and memory divided among `ranks` processes, with speeds assumed from the core's flags."""
    device = cpu_device(ranks)
    said = {"bandwidth, latency, efficiency": f"{ASSUMED}: processes of one machine over gloo"}
    link = {"name": "loopback", "span": ranks, **LOOPBACK, "sources": said}
    network = _assumed(read_network("25gbe"), f"{ASSUMED}: 25 Gb/s Ethernet")
    return NodeFile.model_validate(
        {"device": device, "devices_per_node": ranks, "links": [link] if ranks > 1 else [], "network": network}
    )


def cpu_device(ranks: int) -> dict[str, Any]:
    """What one of `ranks` processes on this machine's cores is, as a [device] table."""
    flags, dtypes = cpu_flags(), cpu_dtypes()
    cores = _available_cores() / ranks
    single = cores * CYCLES * (WIDE if {"avx2", "avx512f", "asimd"} & flags else NARROW)
    gain = max([BFLOAT16_GAIN[flag] for flag in flags & set(BFLOAT16_GAIN)], default=1)
    return {
        "name": cpu_name(),
        "kind": "cpu",
        "memory": write_bytes(_memory() // ranks),
        "dtypes": dtypes,
        "peak_flops": {"float32": write_flops(single), "bfloat16": write_flops(single * gain)},
        "memory_bandwidth": write_bandwidth(cores * CORE_BANDWIDTH),
        "sources": {
            "memory, dtypes": "/proc and the container's limit",
            "peak_flops, memory_bandwidth": f"{ASSUMED}: {cores:g} cores of 2.5 GHz and 8 GB/s",
            "stream, matmul, attention, launch": f"{ASSUMED}: `kumi bench` measures them",
        },
    }


def threads_per_rank(nproc: int, environ: Mapping[str, str]) -> int:
    """Return the threads each of `nproc` ranks computes with: the user's OMP_NUM_THREADS, else an equal share of the
    cores."""
    threads = environ.get("OMP_NUM_THREADS", "")
    if threads.isdecimal() and int(threads) > 0:
        return int(threads)
    return max(1, _available_cores() // nproc)


def _available_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _gpus() -> list[DeviceFile]:
    """The CUDA devices that a program sees here, asked of the driver's own tool so that torch need not be imported."""
    query = ["nvidia-smi", f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        listed = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[part.strip() for part in line.split(",")] for line in listed.strip().splitlines()]
    gpus = [dict(zip(_FIELDS, row, strict=True)) for row in rows]
    return [_gpu(gpu) for gpu in _visible(gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))]


def _visible(gpus: list[dict[str, str]], names: str | None) -> list[dict[str, str]]:
    """Those of `gpus` that CUDA_VISIBLE_DEVICES = `names` leaves, in its order: all where it is not set.

    As CUDA reads it: numbers, or beginnings of UUIDs, up to the first that names no GPU or names one again. Raise
    ConfigError for a part of a GPU (MIG), whose memory and speed are not those of the GPU.
    """
    chosen: list[dict[str, str]] = []
    for name in [gpu["index"] for gpu in gpus] if names is None else names.split(","):
        name = name.strip()
        matches = [gpu for gpu in gpus if gpu["index"] == name or (name[:4] == "GPU-" and gpu["uuid"].startswith(name))]
        if name.startswith("MIG-") or any(gpu["mig.mode.current"] == "Enabled" for gpu in matches):
            raise ConfigError(
                f"this machine's GPU {name!r} is divided by MIG, and kumi does not know what its parts "
                f"are; describe one of them in a file (docs/hardware.md) and name it as "
                f"cluster.source"
            )
        if len(matches) != 1 or matches[0] in chosen:
            break
        chosen += matches
    return chosen


def _gpu(gpu: dict[str, str]) -> DeviceFile:
    """A GPU that nvidia-smi lists: with the figures of the preset that has this name, or with none."""
    name, mebibytes, capability = gpu["name"], gpu["memory.total"], gpu["compute_cap"]
    memory = {"memory": f"{mebibytes} MiB"}
    for preset in presets("devices"):
        device = read_device(preset)
        if device.name == name:
            return device.model_copy(update={"memory": int(mebibytes) * 2**20})
    dtypes = ("float32", "bfloat16", "float16") if float(capability) >= 8.0 else ("float32", "float16")
    if float(capability) >= 8.9:
        dtypes = (*dtypes, "float8")
    return DeviceFile.model_validate({"name": name, "kind": "cuda", "dtypes": dtypes, **memory})


def cpu_name() -> str:
    """Return the name that this machine's CPU has for itself."""
    for line in _cpuinfo():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def cpu_dtypes() -> tuple[str, ...]:
    """bfloat16 counts as fast where the CPU multiplies it natively; float16 never does here."""
    return ("float32", "bfloat16") if set(BFLOAT16_GAIN) & cpu_flags() else ("float32",)


def cpu_flags() -> set[str]:
    """Return what this machine's CPU can do, in the words of /proc/cpuinfo."""
    line = next((line for line in _cpuinfo() if line.startswith(("flags", "Features"))), "")
    return set(line.split())


def _cpuinfo() -> list[str]:
    file = Path("/proc/cpuinfo")
    return file.read_text().splitlines() if file.exists() else []


def _memory() -> int:
    """Bytes of memory this machine, or the container around this process, has."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.exists() else "max"
    return min(total, int(text)) if text.isdigit() else total
