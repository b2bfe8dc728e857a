"""Other kernels for products of matrices: `eval "$(python tests/kernels.py)"` asks MKL for those of another CPU.

The suite must be green with them, too, so that no tolerance is that of one machine's rounding. `ATEN_CPU_CAPABILITY`
and `ONEDNN_MAX_CPU_ISA` leave products as they are.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys

# The first is heard on Intel's CPUs, the second on all.
OTHER = (("MKL_ENABLE_INSTRUCTIONS", "AVX2"), ("MKL_CBWR", "COMPATIBLE"))


def product() -> str:
    """A digest of the bits of some float32 products."""
    import torch

    generator, digest = torch.Generator().manual_seed(0), hashlib.sha256()
    for size in (4, 18, 32, 256):
        left, right = (torch.randn(shape, generator=generator) for shape in ((48, size), (size, 97)))
        digest.update((left @ right).numpy().tobytes())
    return digest.hexdigest()


def product_with(**variables: str) -> str:
    """`product()` in a process of its own, with `variables` in its environment."""
    command = [sys.executable, __file__, "product"]
    environment = {**os.environ, **variables}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()


def other() -> tuple[str, str]:
    """The variable, and its value, with which float32 products have other bits. SystemExit where none does that."""
    usual = product_with()
    for name, value in OTHER:
        if product_with(**{name: value}) != usual:
            return name, value
    asked = " nor ".join(f"{name}={value}" for name, value in OTHER)
    sys.exit(f"neither {asked} changes the bits of a float32 product here: this PyTorch has no MKL, or only one kind")


if __name__ == "__main__":
    print(product() if sys.argv[1:] == ["product"] else "export {}={}".format(*other()))
