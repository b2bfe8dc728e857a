"""Measure how many layouts per second the planner's search covers.

    python benchmarks/planner_speed.py [--json OUT]

Each case is one full search, as `kumi plan` does it: every legal combination of the mesh axes, ZeRO
stage, schedule and stages, microbatch, sequence parallelism, recomputation (mode and number of layers) and offloading.
`layouts` counts legal layouts whose memory was decided, most of them by a formula for any number of recomputed layers;
`timed` those that fit and that no lower bound of their time ruled out. `cpu_seconds` is the time of all threads and
worker processes, which depends less on the load of the machine than `seconds`.

Calculon's own spaces for the first two cases are 11.7 and 7.1 million.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

from kumi.config import job, plan_from_dict
from kumi.plan.search.search_layouts import search

MODELS = Path(__file__).parents[1] / "examples" / "models"

# name: (model, cluster, nodes, sequence length, sequences in a step)
CASES = {
    "gpt3-175b-1024": ("gpt-3-175b", "a100-sxm-80gb", 128, 2048, 4096),
    "gpt3-175b-4096": ("gpt-3-175b", "a100-sxm-80gb", 512, 2048, 4096),
    "llama3.1-405b-16384": ("llama-3.1-405b", "h100-sxm", 2048, 8192, 2048),
    "deepseek-v3-2048": ("deepseek-v3", "h100-sxm", 256, 4096, 15360),
    "llama3.1-405b-98304": ("llama-3.1-405b", "h100-sxm", 12288, 8192, 24576),
}


def run(name: str) -> dict[str, object]:
    """One search: how many layouts, in how many seconds, and what won."""
    model, cluster, nodes, seq_len, sequences = CASES[name]
    searched = job(
        plan_from_dict(
            {
                "model": {"source": str(MODELS / model), "init": "random"},
                "cluster": {"source": cluster, "nodes": nodes},
                "batch": {"seq_len": seq_len, "tokens_per_step": seq_len * sequences},
            }
        )
    )
    start, cpu_start = time.perf_counter(), sum(os.times()[:4])
    result = search(searched, {})
    seconds, cpu_seconds = time.perf_counter() - start, sum(os.times()[:4]) - cpu_start
    best = result.plans[0]
    return {
        "layouts": result.count,
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "fitting": result.fitting,
        "timed": result.timed,
        "layouts_per_second": result.count / seconds,
        "layouts_per_cpu_second": result.count / cpu_seconds,
        "best": best.as_dict()["layout"],
        "step_seconds": best.step_seconds,
        "mfu": best.mfu,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the figures")
    parser.add_argument("--case", choices=CASES, action="append", help="only this case; repeat for more")
    arguments = parser.parse_args()
    results = {}
    for name in arguments.case or CASES:
        results[name] = run(name)
        print(
            f"{name}: {results[name]['layouts']:,} layouts in {results[name]['seconds']:.2f} s, "
            f"{results[name]['cpu_seconds']:.2f} CPU s, {results[name]['layouts_per_cpu_second']:,.0f} layouts/CPU s; "
            f"{results[name]['fitting']:,} fit, "
            f"{results[name]['timed']:,} timed"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
