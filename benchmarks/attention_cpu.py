"""Compare attention on this CPU, forward and backward: kumi's blocks and PyTorch's flash kernel, in turn.

    python benchmarks/attention_cpu.py [--threads 2] [--dtypes float32 bfloat16] [--seconds 0.5]

Prints milliseconds of wall clock / CPU time for each, and their ratio: above 1 the kernel is faster. Each row is one
document, or several documents of random lengths with a given mean.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from functools import partial
from itertools import product

import torch

from kumi.nn.attention.cpu_attention import packed_attention
from kumi.nn.attention.cpu_flash import flash_attention

# Rows, tokens a row, heads, key heads, size of a head.
SHAPES = ((8, 512, 6, 2, 64), (8, 512, 8, 8, 32), (8, 512, 12, 4, 128), (1, 4096, 6, 2, 64))
MEANS = (None, 300, 40)


def bounds(rows: int, length: int, mean: int | None) -> list[int]:
    """Return the first token of each document, and the number of tokens; every row begins a document."""
    tokens, begins = rows * length, set(range(0, rows * length + 1, length))
    draw, place = random.Random(0), 0
    while mean is not None and place < tokens:
        place = min(tokens, place + 1 + int(draw.expovariate(1 / mean)))
        begins.add(place)
    return sorted(begins)


def milliseconds(call: Callable[[], object], seconds: float) -> tuple[float, float]:
    """Return the wall clock and CPU time of a call, the mean over `seconds`."""
    call()
    wall, cpu, calls = time.perf_counter(), time.process_time(), 0
    while time.perf_counter() - wall < seconds:
        call()
        calls += 1
    return (time.perf_counter() - wall) * 1e3 / calls, (time.process_time() - cpu) * 1e3 / calls


def measure(dtype: torch.dtype, shape: tuple[int, ...], mean: int | None, seconds: float) -> list[tuple[float, float]]:
    """Return the milliseconds of the blocks and of the kernel, forward and backward."""
    rows, length, heads, kv_heads, size = shape
    shapes = [(rows, length, count, size) for count in (heads, kv_heads, kv_heads)]
    inputs = [torch.randn(each, dtype=dtype).requires_grad_() for each in shapes]
    grad, marks = torch.randn_like(inputs[0]), bounds(rows, length, mean)
    ways = partial(packed_attention, window=None), flash_attention
    return [
        milliseconds(
            partial(lambda way: torch.autograd.grad(way(*inputs, cu_seqlens=marks), inputs, grad), way), seconds
        )
        for way in ways
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument("--seconds", type=float, default=0.5, help="of each measurement")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print("shape: rows, tokens, heads, key heads, size; ms of wall clock / CPU; ratio: above 1 the kernel is faster")
    for dtype, shape, mean in product(args.dtypes, SHAPES, MEANS):
        blocks, kernel = measure(getattr(torch, dtype), shape, mean, args.seconds)
        documents = "a row each" if mean is None else f"of about {mean} tokens"
        print(
            f"{dtype} {shape}, documents {documents}: blocks {blocks[0]:.1f} / {blocks[1]:.1f}, kernel {kernel[0]:.1f} "
            f"/ {kernel[1]:.1f}, ratio {blocks[0] / kernel[0]:.2f} / {blocks[1] / kernel[1]:.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
