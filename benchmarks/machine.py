"""Describe the machine and the software of a measurement."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

PACKAGES = ("kumi", "torch", "transformers", "accelerate", "tokenizers", "numpy", "safetensors", "triton", "torchtitan")


def describe() -> dict:
    """Return CPU, memory, operating system, package versions and commit; no names of the machine or its user."""
    return {
        "cpu": cpu_name(),
        "cpu_flags": matrix_flags(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "packages": {name: version for name in PACKAGES if (version := package_version(name))},
        "commit": commit(),
    }


def cpu_name() -> str:
    for line in _cpuinfo():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def matrix_flags() -> list[str]:
    """Return the CPU's instruction sets for matmuls."""
    relevant = {"avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "amx_fp16", "sve", "bf16"}
    flags = next((line for line in _cpuinfo() if line.startswith(("flags", "Features"))), "")
    return sorted(relevant & set(flags.split()))


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def package_version(name: str) -> str | None:
    """Return the installed version of `name`, None if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def commit() -> str | None:
    """Return the checkout's commit, with "+" if tracked files differ from it; None outside a checkout."""
    root = Path(__file__).parent
    asked = ["git", "-C", str(root), "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
