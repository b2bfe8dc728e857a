"""Print one JSON object: the GPU, its data-sheet peak, the measured rates of large matmuls and copies, and the kernels
that kumi chose for it by measurement, which are stored for the cases."""

from __future__ import annotations

import json
from statistics import median

import torch

from kumi.config.cluster_source import cluster_spec
from kumi.config.job_sections import ClusterSection
from kumi.train.measure_numerics import measure_gpu


def matmul_flops(size: int = 8192, repeats: int = 20) -> float:
    """Return FLOP/s of the median bf16 matmul of two random square matrices."""
    left, right = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        left @ right
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return 2 * size**3 / median(times[3:])


def copy_bytes_per_s(count: int = 2**31, repeats: int = 10) -> float:
    """Return bytes per second, read and written, of the median copy within the device."""
    source = torch.empty(count, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return 2 * count / median(times[2:])


def main() -> None:
    properties = torch.cuda.get_device_properties(0)
    measured = measure_gpu(properties.name)  # kumi's cases use what it chose
    print(
        json.dumps(
            {
                "device": properties.name,
                "device_memory_bytes": properties.total_memory,
                "capability": f"{properties.major}.{properties.minor}",
                "cuda": torch.version.cuda,
                "devices": torch.cuda.device_count(),
                "kernels": dict(measured.numerics.kernels),
                "peak_flops": cluster_spec(ClusterSection()).device.peak_flops("bfloat16"),
                "measured_matmul_flops": matmul_flops(),
                "measured_copy_bytes_per_s": copy_bytes_per_s(),
            }
        )
    )


if __name__ == "__main__":
    main()
