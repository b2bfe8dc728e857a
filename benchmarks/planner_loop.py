"""The planner's whole loop on this machine: bench it, plan, train, compare, calibrate, and compare again.

    python benchmarks/planner_loop.py [--ranks 1 2 4] [--steps 40] [--quick] [--work FOLDER] [--json OUT]

For each number of ranks on the CPU `kumi bench` measures a cluster file; the quickstart is estimated with it and
trained; the file is calibrated on that run. Then the held-out runs, which calibration has not seen (longer sequences; a
wider and shallower model; ZeRO-3 where there are ranks to divide among) are estimated with the file before and after,
and trained. Everything lies in --work, which is removed first. The machine should have nothing else to do.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import machine

from kumi.bench.refit import read_run, recalibrate
from kumi.plan.estimate import estimate

ROOT = Path(__file__).parents[1]
QUICKSTART = ROOT / "examples" / "quickstart.toml"
SETTINGS = ["export.enabled=false", "sample.prompts=[]", "eval.every=0", "eval.sequences=8", "checkpoint.every=0"]
# What calibration has not seen, as overrides of the quickstart, and the ranks it takes.
HELD_OUT = {
    "longer": (1, ["batch.seq_len=512", "batch.tokens_per_step=4096"]),
    "wider": (
        1,
        [
            "model.config.hidden_size=512",
            "model.config.intermediate_size=1536",
            "model.config.num_hidden_layers=3",
            "model.config.num_attention_heads=8",
        ],
    ),
    "zero-3": (2, ["layout.zero=3"]),
}


def kumi(*words: str, log: Path) -> None:
    """Run a kumi command of this checkout; its output goes to `log`."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    with log.open("w") as output:
        command = [sys.executable, "-m", "kumi", *words]
        code = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, env=environment).returncode
    if code:
        raise SystemExit(f"kumi {words[0]} ended with exit code {code}:\n{log.read_text()[-2000:]}")


def train(work: Path, name: str, cluster: Path, ranks: int, steps: int, overrides: list[str]) -> Path:
    """The folder of the quickstart with `overrides`, trained on the `ranks` ranks of `cluster`."""
    out = work / f"{name}-{ranks}"
    keys = [
        f"name={name}",
        f"cluster.source={cluster}",
        f"cluster.devices_per_node={ranks}",
        f"train.steps={steps}",
        f"train.out={out}",
        f"data.cache={work / 'data'}",
        *SETTINGS,
        *overrides,
    ]
    kumi("train", str(QUICKSTART), *keys, log=work / f"{name}-{ranks}.log")
    return out


def compared(folder: Path, files: dict[str, Path]) -> dict:
    """The run in `folder`, measured, and as estimated with each of `files`."""
    result: dict = {"estimated_seconds": {}}
    for name, file in files.items():
        run = read_run(folder, str(file))
        made = estimate(run.job, run.layout)
        result |= {"measured_seconds": run.seconds, "steps": run.steps}
        result["estimated_seconds"][name] = made.step_seconds
        result["measured_memory"] = run.peak_memory
        result["estimated_memory"] = max(stage.total - stage.reserved for stage in made.memory)
        result.setdefault("time", {})[name] = {kind: seconds for kind, seconds in made.time if seconds}
    return result


def loop(work: Path, ranks: int, steps: int, quick: bool) -> dict:
    """The loop for one number of ranks."""
    measured, refitted = work / f"cpu-{ranks}.toml", work / f"cpu-{ranks}-calibrated.toml"
    since = time.monotonic()
    options = ["--quick"] if quick else []
    kumi("bench", "--ranks", str(ranks), "--out", str(measured), *options, log=work / f"bench-{ranks}.log")
    bench_seconds = time.monotonic() - since
    folder = train(work, "quickstart", measured, ranks, steps, [])
    calibration = recalibrate([folder], str(measured), refitted)
    files = {"bench": measured, "calibrated": refitted}
    held_out = {
        name: compared(train(work, name, measured, ranks, steps, overrides), files)
        for name, (least, overrides) in HELD_OUT.items()
        if ranks >= least
    }
    return {
        "bench_seconds": bench_seconds,
        "cluster_file": measured.read_text(),
        "moved": calibration.moved,
        "kept": calibration.kept,
        "calibrated_on": compared(folder, files),
        "held_out": held_out,
    }


def summary(results: dict) -> dict:
    """Mean absolute and signed relative errors of the estimated steps, and whether the fastest was known."""
    scores = {}
    for file in ("bench", "calibrated"):
        for part in ("calibrated_on", "held_out"):
            errors = [error(run, file) for one in results.values() for run in runs_of(one, part)]
            scores[f"{part}_{file}_mean_abs_error"] = sum(map(abs, errors)) / len(errors)
            scores[f"{part}_{file}_signed_error"] = sum(errors) / len(errors)
    quickstarts = {ranks: one["calibrated_on"] for ranks, one in results.items()}
    fastest = min(quickstarts, key=lambda ranks: quickstarts[ranks]["measured_seconds"])
    chosen = min(quickstarts, key=lambda ranks: quickstarts[ranks]["estimated_seconds"]["bench"])
    regret = quickstarts[chosen]["measured_seconds"] / quickstarts[fastest]["measured_seconds"] - 1
    return scores | {"fastest_ranks": fastest, "chosen_ranks": chosen, "regret": regret}


def runs_of(result: dict, part: str) -> list[dict]:
    return list(result[part].values()) if part == "held_out" else [result[part]]


def error(run: dict, file: str) -> float:
    return run["estimated_seconds"][file] / run["measured_seconds"] - 1


def show(results: dict) -> None:
    print(f"{'ranks':>5} {'run':12} {'measured':>10} {'bench':>18} {'calibrated':>18} {'memory':>9} {'estimated':>9}")
    for ranks, result in results.items():
        for name, run in {"quickstart": result["calibrated_on"], **result["held_out"]}.items():
            estimates = [
                f"{run['estimated_seconds'][file] * 1e3:7.0f} ms {error(run, file):+7.1%}"
                for file in ("bench", "calibrated")
            ]
            memory = [f"{run[key] / 2**20:5.0f} MiB" for key in ("measured_memory", "estimated_memory")]
            print(f"{ranks:>5} {name:12} {run['measured_seconds'] * 1e3:7.0f} ms", *estimates, *memory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--quick", action="store_true", help="bench with --quick")
    parser.add_argument("--work", type=Path, default=Path("build/planner_loop"))
    parser.add_argument("--json", type=Path, metavar="OUT")
    arguments = parser.parse_args()
    shutil.rmtree(arguments.work, ignore_errors=True)
    arguments.work.mkdir(parents=True)
    results = {}
    for ranks in arguments.ranks:
        results[ranks] = loop(arguments.work, ranks, arguments.steps, arguments.quick)
        show({ranks: results[ranks]})
    report = {"machine": machine.describe(), "steps": arguments.steps, "summary": summary(results), "ranks": results}
    print(json.dumps(report["summary"], indent=2))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
