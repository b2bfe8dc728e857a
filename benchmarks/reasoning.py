"""Train examples/format.toml and examples/reasoning.toml with several seeds, and record what the rewards teach.

    pip install 'kumi[reasoning]'
    python benchmarks/reasoning.py [--seeds 1 2 3] [--out runs] [--json benchmarks/results/reasoning.json]

For each seed: accuracy on held-out problems before, during and after reinforcement learning, mean score of the answers
of each batch, share of well-formed replies of the first batch, clock and CPU seconds of both runs with their ranks. A
run that is finished is not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import machine

ROOT = Path(__file__).parents[1]
KINDS = ("format", "reasoning")
ACCURACY, CORRECT = "eval/held-out/accuracy", "rollout/reward/correct"


def train(kind: str, seed: int, out: Path) -> dict[str, float]:
    """Train examples/KIND.toml to out/KIND-SEED unless it is there; return its clock and CPU seconds."""
    folder = out / f"{kind}-{seed}"
    seconds = folder / "seconds.json"
    if not seconds.exists():
        model = out / f"format-{seed}" / "hf"
        words = [f"train.seed={seed}", f"train.out={folder}"]
        if kind == "reasoning":
            words += [f"model.source={model}", f"data.tokenizer={model}"]
        begin, used = time.perf_counter(), _children_seconds()
        command = [sys.executable, "-m", "kumi", "train", f"examples/{kind}.toml", *words]
        subprocess.run(command, cwd=ROOT, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        taken = {"clock_s": time.perf_counter() - begin, "cpu_s": _children_seconds() - used}
        seconds.write_text(json.dumps(taken))
    result: dict[str, float] = json.loads(seconds.read_text())
    return result


def _children_seconds() -> float:
    """CPU seconds of the children that have ended, and of theirs."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def figures(seed: int, out: Path) -> dict[str, Any]:
    """Return the figures of a seed, whose runs are finished."""
    before, entries = (_metrics(out / f"{kind}-{seed}") for kind in KINDS)
    first = next(entry for entry in entries if "rollout/reward/format" in entry)
    start = [(0, entry[ACCURACY]) for entry in before if ACCURACY in entry][-1]
    return {
        "seed": seed,
        "well_formed": first["rollout/reward/format"],
        "accuracy": [start, *((entry["step"], entry[ACCURACY]) for entry in entries if ACCURACY in entry)],
        "reward": [(e["step"], round(e[CORRECT], 4)) for e in entries if CORRECT in e],
        "seconds": {kind: train(kind, seed, out) for kind in KINDS},
    }


def _metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--out", type=Path, default=Path("runs"))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    out = args.out.absolute()
    runs = []
    for seed in args.seeds:
        for kind in KINDS:
            train(kind, seed, out)
        run = figures(seed, out)
        runs.append(run)
        cpu = sum(part["cpu_s"] for part in run["seconds"].values())
        before, after = run["accuracy"][0][1], run["accuracy"][-1][1]
        print(
            f"seed {seed}: {run['well_formed']:.3f} well formed, accuracy {before:.3f} -> {after:.3f}, {cpu:.0f} CPU s"
        )
    if args.json:
        args.json.write_text(json.dumps({"machine": machine.describe(), "runs": runs}, indent=1) + "\n")


if __name__ == "__main__":
    main()
