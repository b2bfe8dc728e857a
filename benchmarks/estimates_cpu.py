"""Compare the estimates of memory and time on this machine with runs of two ranks: every layout, and three row lengths.

    python benchmarks/estimates_cpu.py [--only "tp 2" ...] [--cluster FILE.toml] [--steps 4] [--json FILE]

Each row trains examples/quickstart.toml in a folder of its own and reads what the run itself wrote into metrics.jsonl:
the peak memory of rank 0 beside its estimate. The time of a step is the least of all steps after the first: by the
clock, which needs an idle machine, and as CPU seconds of a rank, which need none where ranks compute all the time. Give
--cluster the file of `kumi bench --out FILE.toml`; without it the speed of this machine is assumed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import machine
from measure import Measured, run

ROOT = Path(__file__).resolve().parents[1]
MIB = 2**20
MEMORY_BAR, TIME_BAR = 0.15, 0.20


@dataclass(frozen=True)
class Row:
    """The pinned fields of a layout, and the rows of a step."""

    layout: dict[str, object]
    seq_len: int = 1024
    sequences: int = 8

    def overrides(self) -> list[str]:
        fields = [f"layout.{name}={value}" for name, value in self.layout.items()]
        return [*fields, f"batch.seq_len={self.seq_len}", f"batch.tokens_per_step={self.seq_len * self.sequences}"]


ROWS = {
    "zero 0": Row({"dp_replicate": 2, "zero": 0, "microbatch": 2}),
    "zero 1": Row({"dp_shard": 2, "zero": 1, "microbatch": 2}),
    "zero 2": Row({"dp_shard": 2, "zero": 2, "microbatch": 2}),
    "zero 3": Row({"dp_shard": 2, "zero": 3, "microbatch": 2}),
    "zero 3 microbatch 1": Row({"dp_shard": 2, "zero": 3, "microbatch": 1}),
    "zero 0 microbatch 4": Row({"dp_replicate": 2, "zero": 0, "microbatch": 4}),
    "recompute full": Row({"dp_replicate": 2, "zero": 0, "microbatch": 4, "recompute": "full"}),
    "recompute selective": Row({"dp_replicate": 2, "zero": 0, "microbatch": 4, "recompute": "selective"}),
    "tp 2": Row({"tp": 2, "microbatch": 2}),
    "pp 2": Row({"pp": 2, "schedule": "1f1b", "microbatch": 2}),
    "cp 2": Row({"cp": 2, "microbatch": 2}),
    "cp 2 ulysses": Row({"cp": 2, "context": "ulysses", "microbatch": 2}),
    "rows of 2048": Row({"cp": 2}, 2048, 2),
    "rows of 8192": Row({"cp": 2}, 8192, 2),
    "rows of 32768": Row({"cp": 2}, 32768, 2),
}


@dataclass(frozen=True)
class Compared:
    """Estimated and measured bytes of rank 0 and seconds of a step; `load`: the load average when the run ended."""

    row: str
    layout: str
    estimated_bytes: int
    measured_bytes: int
    estimated_seconds: float
    wall_seconds: float
    cpu_seconds: float
    load: float

    @property
    def memory_error(self) -> float:
        return self.estimated_bytes / self.measured_bytes - 1

    @property
    def cpu_error(self) -> float:
        return self.estimated_seconds / self.cpu_seconds - 1


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--only", nargs="+", choices=list(ROWS), default=list(ROWS), metavar="ROW")
    parser.add_argument("--cluster", type=Path, help="cluster file that `kumi bench` wrote")
    parser.add_argument("--steps", type=int, default=4, help="steps of a run; the first is not timed")
    parser.add_argument("--data", type=Path, help="folder of prepared data, which is made at the first run")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="further overrides of the run file")
    parser.add_argument("--limit", type=float, default=1800.0, help="seconds for a run")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    rows = []
    with tempfile.TemporaryDirectory(prefix="kumi-estimates-") as folder:
        data = args.data or Path(folder) / "data"
        _prepare(args, Path(folder) / "prepare", data)
        for name in args.only:
            rows.append(compare(name, args, Path(folder) / name.replace(" ", "-"), data))
            print(line(rows[-1]), flush=True)
    result = {"machine": machine.describe(), "steps": args.steps, "cluster": bool(args.cluster)}
    result["rows"] = [asdict(row) for row in rows]
    print("\n".join(summary(rows)))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


def _prepare(args: argparse.Namespace, out: Path, data: Path) -> None:
    """Prepare the data by a run of one short step, so that all estimates know its documents."""
    row = Row({"dp_replicate": 2}, 128, 2)
    measured = _train(row, args, out, data, steps=1)
    if measured.returncode:
        raise SystemExit(f"preparing the data failed:\n{measured.output}")


def compare(name: str, args: argparse.Namespace, out: Path, data: Path) -> Compared:
    """Train the row called `name`. Raise SystemExit with the run's output if it fails."""
    measured = _train(ROWS[name], args, out, data, steps=args.steps)
    if measured.returncode or len(measured.marks) < 2:
        raise SystemExit(f"{name} failed:\n{measured.output}")
    entries = [json.loads(text) for text in (out / "metrics.jsonl").read_text().splitlines()]
    steps = [entry for entry in entries if "train/loss" in entry]
    return Compared(
        name,
        steps[-1]["layout"],
        steps[-1]["mem/estimated_bytes"],
        steps[-1]["mem/peak_bytes"],
        steps[-1]["perf/estimated_step_s"],
        min(entry["perf/step_s"] for entry in steps[1:]),
        min(after.cpu - before.cpu for before, after in pairwise(measured.marks)) / 2,
        os.getloadavg()[0],
    )


def _train(row: Row, args: argparse.Namespace, out: Path, data: Path, *, steps: int) -> Measured:
    command = [sys.executable, "-m", "kumi", "train", str(ROOT / "examples" / "quickstart.toml"), *row.overrides()]
    command += [f"train.out={out}", f"data.cache={data}", f"train.steps={steps}", "eval.sequences=2", "eval.every=0"]
    command += [
        "checkpoint.every=0",
        "export.enabled=false",
        "log.every=1",
        "model.config.max_position_embeddings=32768",
    ]
    command += [f"cluster.source={args.cluster}"] if args.cluster else []
    log = out.with_name(f"{out.name}.log")
    return run([*command, *args.set], metrics=out / "metrics.jsonl", env=os.environ, log=log, limit=args.limit)


def line(row: Compared) -> str:
    """Return the figures of a row."""
    return (
        f"{row.row:20} memory {row.estimated_bytes / MIB:6.0f} / {row.measured_bytes / MIB:6.0f} MiB "
        f"({row.memory_error:+5.0%})  step {row.estimated_seconds:7.2f} / {row.cpu_seconds:7.2f} CPU s "
        f"({row.cpu_error:+5.0%}), {row.wall_seconds:7.2f} s by the clock, load {row.load:.1f}"
    )


def summary(rows: list[Compared]) -> list[str]:
    """Return how many rows are within the bars."""
    memory = sum(abs(row.memory_error) <= MEMORY_BAR for row in rows)
    time = sum(abs(row.cpu_error) <= TIME_BAR for row in rows)
    return [
        f"memory within {MEMORY_BAR:.0%}: {memory} of {len(rows)} rows; "
        f"step, as CPU seconds of a rank, within {TIME_BAR:.0%}: {time} of {len(rows)}"
    ]


if __name__ == "__main__":
    main()
