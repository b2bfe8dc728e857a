"""Packing of units into rows: the share of the rows that is filled, CPU seconds and peak memory.

    python benchmarks/packing.py [--json FILE] [--sizes 100000 1000000 10000000]

Each case runs in a process of its own, so that its peak memory is its own; lengths are random with a fixed seed, and
those longer than a row are cut to a row, so that both programs pack the same. "trl" is the strategy "bfd" of TRL's
`pack_dataset`, which also moves the tokens (one byte each here), at the smallest size only."""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from machine import describe

from kumi.data.packing import pack

# Name -> (positions of a row, lengths of n units). The mean is below an eighth of the row except in the last.
CASES = {
    "lognormal, row 4096": (4096, lambda random, n: random.lognormal(5.3, 1.1, n)),
    "exponential, row 4096": (4096, lambda random, n: random.exponential(480, n)),
    "uniform to a fifth of the row, row 8192": (8192, lambda random, n: random.uniform(1, 8192 / 5, n)),
    "short and long, row 8192": (
        8192,
        lambda random, n: np.where(random.random(n) < 0.9, random.exponential(300, n), random.uniform(2000, 8192, n)),
    ),
    "lognormal, row 32768": (32768, lambda random, n: random.lognormal(7, 1.3, n)),
    "uniform to the row, row 32768": (32768, lambda random, n: random.uniform(1, 32768, n)),
}
SIZES = (100_000, 1_000_000, 10_000_000)


def lengths_of(case, count):
    """Return the lengths of `count` units, int32, and the positions of a row."""
    seq_len, draw = CASES[case]
    values = draw(np.random.default_rng(0), count)
    return np.clip(values, 1, seq_len).astype(np.int32), seq_len


def kumi_case(case, count):
    lengths, seq_len = lengths_of(case, count)
    begun = time.process_time()
    bins = pack(lengths, seq_len, 0)
    return result(lengths, seq_len, bins.rows, time.process_time() - begun)


def trl_case(case, count):
    import pyarrow as pa
    from trl.data_utils import _pack_bfd

    lengths, seq_len = lengths_of(case, count)
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    tokens = pa.LargeListArray.from_arrays(offsets, np.zeros(offsets[-1], np.int8))
    table = pa.table({"input_ids": tokens})
    begun = time.process_time()
    packed = _pack_bfd(table, seq_len)
    return result(lengths, seq_len, len(packed), time.process_time() - begun)


def result(lengths, seq_len, rows, cpu):
    return {
        "units": len(lengths),
        "mean_share_of_row": round(float(lengths.mean()) / seq_len, 4),
        "rows": rows,
        "fill": round(int(lengths.sum(dtype=np.int64)) / (rows * seq_len), 5),
        "cpu_seconds": round(cpu, 2),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


PROGRAMS = {"kumi": kumi_case, "trl": trl_case}


def in_own_process(program, case, count):
    command = [sys.executable, __file__, "--run", program, case, str(count)]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {"program": program, "case": case, **json.loads(output.splitlines()[-1])}


def table(rows):
    """Return the results as text, a line for each."""
    lines = [f"{'lengths':42} {'units':>9}  {'mean/row':>8}  {'fill':>8}  {'CPU s':>7}  {'peak MiB':>8}  program"]
    lines += [
        f"{row['case']:42} {row['units']:>9}  {row['mean_share_of_row']:>8.3f}  {100 * row['fill']:>6.2f} %  "
        f"{row['cpu_seconds']:>7.2f}  {row['peak_mib']:>8}  {row['program']}"
        for row in rows
    ]
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--run", nargs=3, metavar=("PROGRAM", "CASE", "UNITS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        program, case, count = arguments.run
        print(json.dumps(PROGRAMS[program](case, int(count))))
        return
    rows = []
    for case in CASES:
        for count in arguments.sizes:
            for program in PROGRAMS if count == min(arguments.sizes) else ["kumi"]:
                rows.append(in_own_process(program, case, count))
                print(table(rows[-1:]).splitlines()[1], flush=True)
    print(table(rows))
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": describe(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
