"""Compare the optimizers with AdamW on the quickstart, and time the gathering of Muon's matrices.

    python benchmarks/optimizers.py loss [--kinds adamw muon ...] [--rates 5e-4 1e-3 ...] [--steps 300] [--json FILE]
                                         [--set model.config.hidden_size=128 ...]
    python benchmarks/optimizers.py gather [--steps 10] [--json FILE]

`loss`: every kind with every learning rate, on one process; each kind's best rate is the one with the lowest validation
loss at the end. FILE keeps finished runs: a second start continues after them. `--set` changes keys of
the run file, for a smaller model.

`gather`: the seconds of Muon's update on two processes, and the share of gathering matrices to their owners and back.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any

import machine

ROOT = Path(__file__).parents[1]
QUICKSTART = ROOT / "examples" / "quickstart.toml"
KINDS = ("adamw", "adamw-8bit", "muon", "adafactor", "sgd")
RATES = (5e-4, 1e-3, 2e-3, 4e-3, 8e-3)
# In their own units: Adafactor's rate is relative to a parameter's size, SGD's update is the gradient's.
OTHER_RATES = {"adafactor": (5e-3, 1e-2, 2e-2, 4e-2, 8e-2), "sgd": (0.03, 0.1, 0.3, 1.0, 3.0)}
LAYOUTS = {"one process": {}, "fsdp 2": {"dp_shard": 2, "zero": 3}, "tp 2": {"tp": 2}}


def train(kind: str, rate: float, args: argparse.Namespace, folder: Path) -> dict[str, list[float]]:
    """Run the quickstart; return its training losses and, every 25 steps, its validation losses."""
    steps = args.steps
    out = folder / f"{kind}-{rate:g}"
    words = {
        "optim.kind": kind,
        "optim.lr": f"{rate:g}",
        "train.steps": steps,
        "train.out": out,
        "data.cache": folder / "tokens",
        "cluster.devices_per_node": 1,
        "eval.every": 25,
        "checkpoint.every": steps,
        "sample.prompts": "[]",
        "log.every": 1,
    }
    line = [
        sys.executable,
        "-m",
        "kumi",
        "train",
        str(QUICKSTART),
        *(f"{key}={value}" for key, value in words.items()),
        *args.set,
    ]
    done = subprocess.run(line, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(line)} failed:\n{done.stdout}{done.stderr}")
    rows = [json.loads(row) for row in (out / "metrics.jsonl").read_text().splitlines()]
    return {name: [row[name] for row in rows if name in row] for name in ("train/loss", "eval/loss")}


def best(rows: dict[str, dict[str, Any]], kind: str) -> dict[str, Any] | None:
    """Return the run of `kind` with the lowest validation loss at the end."""
    mine = [row for row in rows.values() if row["kind"] == kind]
    return min(mine, key=lambda row: row["eval/loss"][-1], default=None)


def table(rows: dict[str, dict[str, Any]]) -> str:
    """Return each kind's best rate and last validation loss, next to AdamW's."""
    lines, adamw = [f"{'optimizer':12}{'rate':>10}{'loss':>9}{'of AdamW':>10}{'as AdamW at':>13}"], best(rows, "adamw")
    for kind in KINDS:
        run = best(rows, kind)
        if run is None or adamw is None:
            continue
        target = adamw["eval/loss"][-1]
        reached = next((25 * (place + 1) for place, loss in enumerate(run["eval/loss"]) if loss <= target), None)
        loss = run["eval/loss"][-1]
        when = f"step {reached}" if reached else "never"
        lines.append(f"{kind:12}{run['lr']:>10g}{loss:>9.4f}{loss / target:>10.4f}{when:>13}")
    return "\n".join(lines)


def losses(args: argparse.Namespace) -> None:
    """Run the pairs that the file does not have yet, and print the table after each run."""
    file = Path(args.json) if args.json else None
    results = json.loads(file.read_text()) if file and file.exists() else {}
    results = {"machine": machine.describe(), "steps": args.steps, "set": args.set, **results}
    rows = results.setdefault("rows", {})
    with tempfile.TemporaryDirectory() as folder:
        for kind in args.kinds:
            for rate in args.rates or OTHER_RATES.get(kind, RATES):
                name = f"{kind} {rate:g}"
                if name not in rows:
                    rows[name] = {"kind": kind, "lr": rate, **train(kind, rate, args, Path(folder))}
                    _write(file, results)
                    print(f"{name}: {rows[name]['eval/loss'][-1]:.4f}", flush=True)
    print(table(rows))


def gather(args: argparse.Namespace) -> None:
    """Time Muon's update in every layout."""
    import torch.multiprocessing as processes

    file = Path(args.json) if args.json else None
    results = json.loads(file.read_text()) if file and file.exists() else {}
    results.setdefault("machine", machine.describe())
    for name, fields in LAYOUTS.items():
        with tempfile.TemporaryDirectory() as folder:
            ranks = 1 if not fields else 2
            processes.spawn(_rank, (ranks, fields, args.steps, folder), nprocs=ranks)
            times = json.loads((Path(folder) / "times.json").read_text())
        results.setdefault("gather", {})[name] = times
        print(f"{name:12} update {1e3 * times['update_s']:.1f} ms, gathering {100 * times['gather_share']:.0f} %")
    _write(file, results)


def _rank(rank: int, ranks: int, fields: dict[str, int], steps: int, folder: str) -> None:
    """Return this rank's seconds of an update and their share in messages, the median over steps."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1")
    os.environ.update(MASTER_PORT="29533", GLOO_SOCKET_IFNAME="lo")
    import torch

    from kumi.parallel import build, build_mesh, build_optimizer, close_distributed, init_distributed, unwrap
    from kumi.parallel.optim import whole_matrices
    from kumi.spec import families
    from kumi.spec.layout import Layout
    from kumi.spec.optim import Optim
    from kumi.spec.precision import PRECISIONS

    torch.set_num_threads(1)
    mesh = build_mesh(Layout(**fields), init_distributed())
    spec = families.from_hf(tomllib.loads(QUICKSTART.read_text())["model"]["config"])
    model = build(spec, mesh, PRECISIONS["fp32"], weights=0)
    optimizer, sent = build_optimizer(model, mesh, Optim(kind="muon")), [0.0]
    exchange = whole_matrices._exchange

    def timed(*args: Any) -> Any:
        began = time.perf_counter()
        try:
            return exchange(*args)
        finally:
            sent[0] += time.perf_counter() - began

    whole_matrices._exchange = timed
    seconds, shares = [], []
    for _ in range(steps):
        for parameter in unwrap(model).parameters():
            parameter.grad = torch.ones_like(parameter)
        sent[0], began = 0.0, time.perf_counter()
        optimizer.step()
        seconds.append(time.perf_counter() - began)
        shares.append(sent[0] / seconds[-1])
    if rank == 0:
        times = {"update_s": sorted(seconds)[steps // 2], "gather_share": sorted(shares)[steps // 2]}
        (Path(folder) / "times.json").write_text(json.dumps(times))
    close_distributed()


def _write(file: Path | None, results: dict[str, Any]) -> None:
    if file is not None:
        file.write_text(json.dumps(results, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("loss", "gather"))
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS)
    parser.add_argument("--rates", nargs="+", type=float)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--set", nargs="+", default=[])
    parser.add_argument("--json")
    args = parser.parse_args()
    args.steps = args.steps or (300 if args.what == "loss" else 10)
    {"loss": losses, "gather": gather}[args.what](args)


if __name__ == "__main__":
    main()
