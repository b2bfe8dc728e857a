"""CPU time and memory of Mamba-2's recurrence, forward and backward, in kumi and in transformers' PyTorch path.

    python benchmarks/scan_cpu.py [--lengths 2048 8192] [--repeats 5]

One row of each length in float32, with 16 heads of 64 channels in two groups, states of 128 and chunks of 128: an
eighth of a layer of Nemotron-H 8B. Each case runs in a process of its own on one thread; the fastest of the repeats
counts, in CPU seconds, and the growth of the process's peak memory.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from math import inf

HEADS, CHANNELS, GROUPS, STATE, CHUNK = 16, 64, 2, 128, 128


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--case", choices=("kumi", "transformers"), help="measure this one here, and print it as JSON")
    args = parser.parse_args()
    if args.case:
        print(json.dumps(measure(args.case, args.lengths[0], args.repeats)))
        return
    print("| positions | | forward, us a token | backward, us a token | memory, MiB |\n|---|---|---|---|---|")
    for length in args.lengths:
        for case in ("kumi", "transformers"):
            result = in_new_process(case, length, args.repeats)
            print(
                f"| {length:,} | {case} | {result['forward']:.0f} | {result['backward']:.0f} | {result['memory']:.0f} |"
            )


def in_new_process(case: str, length: int, repeats: int) -> dict[str, float]:
    """Run `measure` in a process of its own."""
    command = [sys.executable, __file__, "--case", case, "--lengths", str(length), "--repeats", str(repeats)]
    done = subprocess.run(
        command, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True, capture_output=True, text=True
    )
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def measure(case: str, length: int, repeats: int) -> dict[str, float]:
    """Return microseconds of CPU time a token, forward and backward, and the MiB by which the process grew."""
    import torch

    torch.set_num_threads(1)
    random = torch.Generator().manual_seed(0)
    both = (1, length, GROUPS, STATE)
    shapes = ((1, length, HEADS, CHANNELS), both, both, (1, length, HEADS), (HEADS,), (HEADS,), (HEADS,))
    leaves = [torch.randn(shape, generator=random).requires_grad_() for shape in shapes]
    run, before, times = recurrence(case, leaves), peak(), []
    for _ in range(repeats):
        for leaf in leaves:
            leaf.grad = None
        begun = time.process_time()
        out = run()
        between = time.process_time()
        out.sum().backward()
        times.append((between - begun, time.process_time() - between))
    forward, backward = (min(each) * 1e6 / length for each in zip(*times))
    return {"forward": forward, "backward": backward, "memory": peak() - before}


def recurrence(case: str, leaves: list) -> Callable:
    """Return the recurrence of `leaves` (x, b, c, dt, dt_bias, a_log, d) as a function without arguments."""
    x, b, c, dt, dt_bias, a_log, d = leaves
    if case == "kumi":
        from kumi.nn.mamba_scan import ScanInputs, scan

        return lambda: scan(ScanInputs(*leaves, None, CHUNK, 0.001, inf))
    from transformers.models.nemotron_h.modeling_nemotron_h import mamba2_chunk_scan

    return lambda: mamba2_chunk_scan(
        x, dt, -a_log.exp(), b, c, CHUNK, D=d, dt_bias=dt_bias, dt_softplus=True, dt_limit=(0.001, inf)
    )


def peak() -> float:
    """Return the peak MiB of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main()
