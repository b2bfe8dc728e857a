"""Measure this machine's matmuls: GFLOP/s in float32, float32 through oneDNN, and bf16.

    python benchmarks/matmul_peak.py [--threads N] [--json FILE]

Large square matmuls give the peak that a training step is compared with; the shapes of the benchmark's own model tell
how much of it matmuls of that size can reach. "fp32 medium" is `set_float32_matmul_precision("medium")`, which sends
float32 matmuls to oneDNN; the relative error to float64 is printed, too, because on a CPU with AMX that setting may
round the operands to bf16.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
from pathlib import Path
from statistics import median

import torch

# (rows, in, out): large squares, then W1's matmuls of a forward pass over 4,096 tokens.
LARGE = [(2048, 2048, 2048), (3072, 3072, 3072)]
W1_SHAPES = [(4096, 384, 384), (4096, 384, 128), (4096, 384, 1024), (4096, 1024, 384), (4096, 384, 8192)]
KINDS = {
    "fp32": (torch.float32, "highest"),
    "fp32 medium": (torch.float32, "medium"),
    "bf16": (torch.bfloat16, "highest"),
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seconds", type=float, default=0.25, help="time spent on each shape and kind")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def rate(shape: tuple[int, int, int], dtype: torch.dtype, seconds: float) -> dict[str, float]:
    """Return GFLOP/s of x @ w.T by the wall clock (the median and the best) and per CPU second."""
    rows, inner, out = shape
    x = torch.randn(rows, inner).to(dtype)
    weight = torch.randn(out, inner).to(dtype)
    for _ in range(2):
        torch.nn.functional.linear(x, weight)
    flops, times = 2 * rows * inner * out / 1e9, []
    began, cpu = time.perf_counter(), cpu_seconds()
    while len(times) < 3 or time.perf_counter() - began < seconds:
        start = time.perf_counter()
        torch.nn.functional.linear(x, weight)
        times.append(time.perf_counter() - start)
    spent = cpu_seconds() - cpu
    return {"gflops": flops / median(times), "best": flops / min(times), "per_cpu_second": flops * len(times) / spent}


def relative_error(dtype: torch.dtype) -> float:
    """Return the relative Frobenius-norm error of a matmul of 1024 x 1024 matrices against float64."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(1024, 1024, generator=generator, dtype=torch.float64) for _ in range(2))
    exact = x @ weight.T
    result = torch.nn.functional.linear(x.to(dtype), weight.to(dtype)).double()
    return ((result - exact).norm() / exact.norm()).item()


def measure(threads: int, seconds: float) -> dict:
    """Return for each kind its rates at every shape, the peak of large shapes and the numeric error."""
    torch.set_num_threads(threads)
    result: dict = {"threads": threads, "kinds": {}}
    for kind, (dtype, precision) in KINDS.items():
        torch.set_float32_matmul_precision(precision)
        rates = {shape: rate(shape, dtype, seconds) for shape in (*LARGE, *W1_SHAPES)}
        large = [rates[shape] for shape in LARGE]
        result["kinds"][kind] = {
            "peak": max(found["best"] for found in large),
            "peak_per_cpu_second": max(found["per_cpu_second"] for found in large),
            "error": relative_error(dtype),
            "shapes": {"x".join(map(str, shape)): found for shape, found in rates.items()},
        }
    torch.set_float32_matmul_precision("highest")
    return result


def report(result: dict) -> str:
    """Return the result as a table of GFLOP/s (median)."""
    kinds = list(result["kinds"])
    lines = [
        f"GFLOP/s of x @ w.T with {result['threads']} threads (median); rows x in x out",
        f"{'shape':>18}" + "".join(f"{kind:>14}" for kind in kinds),
    ]
    for shape in result["kinds"][kinds[0]]["shapes"]:
        lines.append(
            f"{shape:>18}" + "".join(f"{result['kinds'][kind]['shapes'][shape]['gflops']:14.0f}" for kind in kinds)
        )
    for label, key, form in (
        ("peak (best)", "peak", "14.0f"),
        ("per CPU second", "peak_per_cpu_second", "14.0f"),
        ("relative error", "error", "14.1e"),
    ):
        lines.append(f"{label:>18}" + "".join(format(result["kinds"][kind][key], form) for kind in kinds))
    return "\n".join(lines)


def main() -> None:
    args = arguments()
    result = measure(args.threads, args.seconds)
    print(report(result))
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
