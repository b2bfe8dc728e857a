"""Run the suite with other matmul kernels: `eval "$(python tests/kernels.py)"` has MKL use those of another CPU.

The suite must pass with them, too, so that no tolerance fits the rounding of one machine only. `ATEN_CPU_CAPABILITY`
and `ONEDNN_MAX_CPU_ISA` do not change float32 matmuls.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys

# The first takes effect on Intel CPUs only, the second on all.
OTHER = (("MKL_ENABLE_INSTRUCTIONS", "AVX2"), ("MKL_CBWR", "COMPATIBLE"))


def product() -> str:
    """Return a digest of the bits of some float32 matmuls."""
    import torch

    generator, digest = torch.Generator().manual_seed(0), hashlib.sha256()
    for size in (4, 18, 32, 256):
        left, right = (torch.randn(shape, generator=generator) for shape in ((48, size), (size, 97)))
        digest.update((left @ right).numpy().tobytes())
    return digest.hexdigest()


def product_with(**variables: str) -> str:
    """Return the result of `product()` in a new process with the environment `variables`."""
    command = [sys.executable, __file__, "product"]
    environment = {**os.environ, **variables}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()


def other() -> tuple[str, str]:
    """Return a variable and its value that change the bits of float32 matmuls. Raise SystemExit if none does."""
    default = product_with()
    for name, value in OTHER:
        if product_with(**{name: value}) != default:
            return name, value
    tried = " nor ".join(f"{name}={value}" for name, value in OTHER)
    sys.exit(f"neither {tried} changes the bits of a float32 matmul here: this PyTorch has no MKL, or only one kernel")


if __name__ == "__main__":
    print(product() if sys.argv[1:] == ["product"] else "export {}={}".format(*other()))
