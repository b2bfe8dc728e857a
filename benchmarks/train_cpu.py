"""Compare kumi with a bare PyTorch loop and the Hugging Face Trainer on this machine's CPU, in turn.

    python benchmarks/train_cpu.py [--work build/benchmark] [--repeats 2] [--only "kumi bf16" ...] [--json FILE]

Each row is a command, measured from outside by benchmarks/measure.py. Rows alternate (A B C A B C), so that other load
on the machine affects all of them. docs/benchmarks.md describes the measurements.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

import machine
import measure
import report_cpu
import workload

HERE = Path(__file__).parent
DROP = 3


@dataclass(frozen=True)
class Setup:
    """Processes, threads of each, and steps of one run."""

    name: str
    processes: int
    threads: int
    steps: int

    @property
    def tokens(self) -> int:
        """Tokens in a step."""
        return self.processes * workload.MICROBATCH * workload.SEQ_LEN


SETUPS = (Setup("1 process x 2 threads", 1, 2, 8), Setup("2 processes x 1 thread", 2, 1, 6))

# Row -> (script, its options); kumi's rows have the precision instead. The order is the order of measurement.
ROWS: dict[str, tuple[str, tuple[str, ...]]] = {
    "bare fp32": ("bare_loop.py", ("--dtype", "fp32")),
    "kumi fp32": ("kumi", ("fp32",)),
    "bare amp": ("bare_loop.py", ("--dtype", "amp")),
    "kumi bf16": ("kumi", ("bf16",)),
    "trainer fp32": ("hf_trainer.py", ("--dtype", "fp32")),
    "trainer amp": ("hf_trainer.py", ("--dtype", "amp")),
    "bare compile amp": ("bare_loop.py", ("--dtype", "amp", "--compile")),
    "bare fp32 packed": ("bare_loop.py", ("--dtype", "fp32", "--packed")),
    "kumi fp32 packed": ("kumi", ("fp32", "packed")),
    "bare amp packed": ("bare_loop.py", ("--dtype", "amp", "--packed")),
    "kumi bf16 packed": ("kumi", ("bf16", "packed")),
}
DEFAULT_ROWS = tuple(ROWS)[:5]
# Slow, and in no ratio of interest: measured once, after all repeats of the others.
ONCE = ("trainer fp32", "trainer amp")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--work", type=Path, default=Path("build/benchmark"), help="folder for data, model and logs")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument(
        "--only",
        nargs="+",
        choices=list(ROWS),
        default=list(DEFAULT_ROWS),
        metavar="ROW",
        help=f"rows to measure: {', '.join(ROWS)}",
    )
    parser.add_argument("--setups", nargs="+", type=int, choices=(1, 2), default=[1, 2], metavar="PROCESSES")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and little text, to try the script")
    parser.add_argument("--steps", type=int, help=f"steps of every run; the first {DROP} are not counted")
    parser.add_argument("--budget", type=float, default=680.0, help="seconds; runs that would end later are left out")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.steps is not None and args.steps < DROP + 2:
        parser.error(
            f"--steps {args.steps}: the first {DROP} are not counted, and two are needed; use {DROP + 2} or more"
        )
    return args


def environment(threads: int) -> dict[str, str]:
    """Return the environment of every row.

    Waiting threads sleep: spinning ones would count as CPU time and slow others.
    """
    extra = {
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "GLOO_SOCKET_IFNAME": "lo",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "PYTHONWARNINGS": "ignore",
    }
    return {**os.environ, **extra}


def reason_missing(row: str) -> str | None:
    """Return the reason why `row` cannot be measured here, None if it can."""
    script, _ = ROWS[row]
    needed = {"kumi": ("kumi",), "bare_loop.py": ("transformers",), "hf_trainer.py": ("transformers", "accelerate")}
    absent = [name for name in needed[script] if find_spec(name) is None]
    return f"the package {absent[0]} is not installed: pip install {absent[0]}" if absent else None


def command(row: str, setup: Setup, work: Path, out: Path, size: str) -> tuple[list[str], Path]:
    """Return the command of `row`, and the file to which it writes its steps."""
    script, options = ROWS[row]
    if script == "kumi":
        file = out / "run.toml"
        text = workload.run_file(
            work,
            ranks=setup.processes,
            steps=setup.steps,
            precision=options[0],
            out=out / "run",
            cross_document="packed" not in options,
            size=size,
        )
        file.write_text(text)
        return [sys.executable, "-m", "kumi", "train", str(file)], out / "run" / "metrics.jsonl"
    start = [sys.executable]
    if setup.processes > 1:
        start += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(setup.processes)]
    metrics = out / "metrics.jsonl"
    batches = work / ("packed.npz" if "--packed" in options else "batches.npz")
    given = [
        "--model",
        work / "model",
        "--batches",
        batches,
        "--metrics",
        metrics,
        "--steps",
        setup.steps,
        "--microbatch",
        workload.MICROBATCH,
    ]
    return [*start, str(HERE / script), *options, *map(str, given)], metrics


def run_row(row: str, setup: Setup, work: Path, repeat: int, size: str) -> measure.Measured:
    """Run `row` from an empty folder. Raise SystemExit with the end of its output if it fails."""
    out = work / "runs" / f"{row.replace(' ', '_')}_{setup.processes}_{repeat}"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    line, metrics = command(row, setup, work, out, size)
    measured = measure.run(line, metrics=metrics, env=environment(setup.threads), log=out / "log.txt")
    if measured.returncode != 0 or len(measured.marks) != setup.steps:
        raise SystemExit(
            f"{row}, {setup.name}: exit code {measured.returncode} after {len(measured.marks)} of {setup.steps} "
            f"steps; the end of its output:\n{measured.output}"
        )
    shutil.rmtree(out / "run", ignore_errors=True)
    return measured


def matmul_peak(threads: int) -> dict:
    """Return the results of benchmarks/matmul_peak.py with `threads` threads."""
    file = Path(os.environ.get("TMPDIR", "/tmp")) / f"matmul_peak_{os.getpid()}.json"
    options = ["--threads", str(threads), "--seconds", "0.15", "--json", str(file)]
    subprocess.run(
        [sys.executable, str(HERE / "matmul_peak.py"), *options],
        env=environment(threads),
        check=True,
        stdout=subprocess.DEVNULL,
    )
    rates = json.loads(file.read_text())
    file.unlink()
    return rates


def chosen_numerics(setup: Setup) -> dict:
    """Return kumi's chosen numerics with the threads of `setup`, and the seconds of measuring, without imports."""
    program = (
        f"import json; from kumi.train.measure_numerics import measure_here; here = measure_here({setup.processes})\n"
        "row = {'numerics': str(here.numerics), 'kind': here.numerics.kind, 'seconds': here.measuring_seconds}\n"
        "print(json.dumps(row))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment(setup.threads), check=True, stdout=subprocess.PIPE, text=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def order(rows: list[str], setups: list[Setup], repeats: int) -> list[tuple[str, Setup, int]]:
    """Return row, setup and number of every run: the rows in turn, setup after setup, for each repeat."""
    again = [row for row in rows if row not in ONCE]
    once = [(row, setup, 0) for setup in setups for row in rows if row in ONCE]
    return [(row, setup, repeat) for repeat in range(repeats) for setup in setups for row in again] + once


def measure_all(args: argparse.Namespace, setups: list[Setup], rows: list[str], began: float) -> tuple[dict, list[str]]:
    """Return (row, setup name) -> its runs, and the runs left out by the budget, which counts from `began`."""
    measured: dict[tuple[str, str], list[measure.Measured]] = {}
    left_out = []
    for row, setup, repeat in order(rows, setups, args.repeats):
        before = measured.setdefault((row, setup.name), [])
        same_setup = [run.wall for (_, name), runs in measured.items() if name == setup.name for run in runs]
        expected = max((run.wall for run in before), default=max(same_setup, default=0.0))
        if time.monotonic() - began + expected > args.budget:
            left_out.append(f"{row}, {setup.name}, repeat {repeat + 1}")
            continue
        before.append(run_row(row, setup, args.work, repeat, args.size))
        mark = before[-1].steady(DROP)
        summary = f"  {row}, {setup.name}: {setup.tokens / mark.wall:.0f} tokens/s, {mark.cpu:.2f} CPU s a step"
        print(summary, file=sys.stderr, flush=True)
    return {key: runs for key, runs in measured.items() if runs}, left_out


def main() -> None:
    args = arguments()
    args.work = args.work.resolve()
    setups = [setup for setup in SETUPS if setup.processes in args.setups]
    if args.steps:
        setups = [Setup(setup.name, setup.processes, setup.threads, args.steps) for setup in setups]
    skipped = {row: reason for row in args.only if (reason := reason_missing(row))}
    rows = [row for row in ROWS if row in args.only and row not in skipped]
    args.size = "tiny" if args.tiny else "w1"
    sequences = max(setup.processes * setup.steps * workload.MICROBATCH for setup in setups)
    workload.prepare(args.work, sequences, args.size)
    choices = {setup.name: chosen_numerics(setup) for setup in setups}
    began = time.monotonic()
    peaks = [matmul_peak(2)]
    measured, left_out = measure_all(args, setups, rows, began)
    peaks.append(matmul_peak(2))
    result = {
        "machine": machine.describe(),
        "peaks": peaks,
        "shape": workload.SIZES[args.size].shape,
        "setups": [asdict(setup) | {"tokens": setup.tokens, "chosen": choices[setup.name]} for setup in setups],
        "runs": [
            {"row": row, "setup": setup, **asdict(run)} for (row, setup), runs in measured.items() for run in runs
        ],
        "skipped": skipped,
        "left_out": left_out,
        "drop": DROP,
    }
    print(report_cpu.report(result))
    if args.json:
        for run in result["runs"]:
            del run["output"]
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
