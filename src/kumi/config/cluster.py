"""Cluster descriptions: this machine, a preset, or a TOML file."""

from __future__ import annotations

import os
import platform
import subprocess
import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from kumi.config.schema import ClusterSection, Positive, Section
from kumi.errors import ConfigError
from kumi.spec.cluster import ClusterSpec, Device
from kumi.units import parse_bytes


class DeviceFile(Section):
    name: str
    kind: Literal["cpu", "cuda"]
    memory: str
    dtypes: tuple[str, ...]
    peak_flops: dict[str, Annotated[float, Field(gt=0)]] = Field(default_factory=dict)


class ClusterFile(Section):
    """A cluster TOML file: where its figures come from, the device, and how many a node has."""

    source: str
    devices_per_node: Positive
    device: DeviceFile


def cluster_spec(section: ClusterSection) -> ClusterSpec:
    """The cluster that `section` names. Raises ConfigError when it cannot be found or read."""
    if section.source == "auto":
        return _this_machine(section)
    described = _read(section.source)
    device = described.device
    try:
        memory = parse_bytes(device.memory)
    except ConfigError as error:
        raise ConfigError(f"cluster.source: {section.source}: device.memory: {error}") from None
    spec = Device(device.name, device.kind, memory, device.dtypes, tuple(device.peak_flops.items()))
    return ClusterSpec(section.source, spec, section.devices_per_node or described.devices_per_node, section.nodes)


def presets() -> list[str]:
    """Names of the clusters that come with kumi."""
    return sorted(
        item.name.removesuffix(".toml") for item in files("kumi.clusters").iterdir() if item.name.endswith(".toml")
    )


def _read(source: str) -> ClusterFile:
    file = Path(source) if source.endswith(".toml") else files("kumi.clusters").joinpath(f"{source}.toml")
    if not file.is_file():
        raise ConfigError(
            f"cluster.source: {source!r} is no preset and no TOML file; use 'auto', {', '.join(presets())}, or a file"
        )
    try:
        return ClusterFile.model_validate(tomllib.loads(file.read_text(encoding="utf-8")))
    except ValidationError as error:
        wrong = (f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
        raise ConfigError(f"cluster.source: {source}: {'; '.join(wrong)}; correct the file") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"cluster.source: {source} cannot be read as TOML ({error}); correct the file") from None


def _this_machine(section: ClusterSection) -> ClusterSpec:
    gpus = _gpus()
    if gpus:
        return ClusterSpec("auto", gpus[0], section.devices_per_node or len(gpus), section.nodes)
    ranks = section.devices_per_node or 1
    device = Device(_cpu_name(), "cpu", _memory() // ranks, _cpu_dtypes())
    return ClusterSpec("auto", device, ranks, section.nodes)


def _gpus() -> list[Device]:
    """The CUDA devices of this machine, asked of the driver's own tool so that torch need not be imported."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,compute_cap", "--format=csv,noheader,nounits"]
    try:
        listed = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = (
        len([part for part in visible.split(",") if part.strip() not in ("", "-1")]) if visible is not None else None
    )
    return [_gpu(line) for line in listed.strip().splitlines()][:count]


def _gpu(line: str) -> Device:
    name, mebibytes, capability = (part.strip() for part in line.split(","))
    dtypes = ("float32", "bfloat16", "float16") if float(capability) >= 8.0 else ("float32", "float16")
    return Device(name, "cuda", int(mebibytes) * 2**20, dtypes, _known_peak(name))


def _known_peak(name: str) -> tuple[tuple[str, float], ...]:
    """Peak FLOP/s of the preset whose device has this driver name; empty where none has, never a guess."""
    for preset in presets():
        device = _read(preset).device
        if device.name == name:
            return tuple(device.peak_flops.items())
    return ()


def _cpu_name() -> str:
    for line in _cpuinfo():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _cpu_dtypes() -> tuple[str, ...]:
    """bfloat16 counts as fast where the CPU multiplies it natively; float16 never does here."""
    flags = next((line for line in _cpuinfo() if line.startswith(("flags", "Features"))), "")
    return ("float32", "bfloat16") if {"avx512_bf16", "amx_bf16", "bf16"} & set(flags.split()) else ("float32",)


def _cpuinfo() -> list[str]:
    file = Path("/proc/cpuinfo")
    return file.read_text().splitlines() if file.exists() else []


def _memory() -> int:
    """Bytes of memory this machine, or the container around this process, has."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.exists() else "max"
    return min(total, int(text)) if text.isdigit() else total
