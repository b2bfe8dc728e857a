"""The cost of layouts on two processes: their CPU seconds per token, relative to those of one process.

    python benchmarks/layouts_cpu.py [--only "cp 2" ...] [--repeats 3] [--steps 3] [--seq-len 1024] [--json FILE]

Every row trains the same model on as many tokens a step, its processes started anew for each repeat, in turn with one
process alone, so that other load on the machine affects all rows. CPU seconds are those of all threads of all
ranks, in steps after the first. A rank's microbatch has equally many tokens in every layout.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import machine
import shapes

from kumi.spec.layout import Layout

WARM = 1


@dataclass(frozen=True)
class Row:
    """A layout of a dense model, or of one with experts.

    `bar`: the largest accepted ratio of its CPU seconds per token to those of one process."""

    layout: Layout
    bar: float
    experts: bool = False

    @property
    def alone(self) -> str:
        """The row of one process that this one is compared with."""
        return ONE_PROCESS_EXPERTS if self.experts else ONE_PROCESS


ONE_PROCESS, ONE_PROCESS_EXPERTS = "one process", "one, experts"
ROWS = {
    ONE_PROCESS: Row(Layout(), 1.0),
    ONE_PROCESS_EXPERTS: Row(Layout(), 1.0, experts=True),
    "dp 2": Row(Layout(dp_replicate=2), 1.15),
    "fsdp 2": Row(Layout(dp_shard=2, zero=3), 1.15),
    "cp 2": Row(Layout(cp=2), 1.15),
    "cp 2 ulysses": Row(Layout(cp=2, context="ulysses"), 1.15),
    "cp 2 zero 1": Row(Layout(cp=2, zero=1), 1.15),
    "pp 2": Row(Layout(pp=2), 1.1),
    "pp 2 zb-h1": Row(Layout(pp=2, schedule="zb-h1"), 1.1),
    "tp 2": Row(Layout(tp=2), 1.3),
    "tp 2 without sp": Row(Layout(tp=2, sequence_parallel=False), 1.3),
    "ep 2": Row(Layout(dp_shard=2, zero=1, ep=2), 1.2, experts=True),
    "ep 2 tp 2": Row(Layout(tp=2, ep=2), 1.3, experts=True),
}


@dataclass(frozen=True)
class Measured:
    """Seconds of the steps of one run: CPU time over all ranks, and wall clock."""

    row: str
    cpu: list[float]
    wall: list[float]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument(
        "--only",
        nargs="+",
        choices=list(ROWS),
        default=list(ROWS),
        metavar="ROW",
        help=f"rows to measure: {', '.join(ROWS)}",
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3, help=f"steps of every run, after {WARM} that are not counted")
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--sequences", type=int, default=8, help="sequences of a step; an even number")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    if args.rank_of:
        args.out.write_text(json.dumps(train(args)))
        return
    selected = {*args.only, *(ROWS[name].alone for name in args.only)}
    rows = [name for name in ROWS if name in selected]
    runs = []
    for repeat in range(args.repeats):
        for name in rows:
            runs.append(run_row(name, args))
            cpu = statistics.median(runs[-1].cpu) / tokens(args)
            print(f"  repeat {repeat + 1}, {name}: {1e3 * cpu:.3f} CPU s per 1000 tokens", file=sys.stderr, flush=True)
    result = {
        "machine": machine.describe(),
        "tokens": tokens(args),
        "seq_len": args.seq_len,
        "precision": args.precision,
        "rows": summary(runs, args),
        "runs": [asdict(run) for run in runs],
    }
    print(table(result))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


def tokens(args: argparse.Namespace) -> int:
    """Return the tokens of a step, over all ranks."""
    return int(args.sequences * args.seq_len)


def run_row(name: str, args: argparse.Namespace) -> Measured:
    """Measure one run of the row's layout. Raise SystemExit with a rank's output if one fails."""
    ranks = ROWS[name].layout.world_size
    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        outs = [Path(folder) / f"{rank}.json" for rank in range(ranks)]
        started = [_start(name, rank, ranks, port, out, args) for rank, out in enumerate(outs)]
        outputs = [process.communicate()[0] for process in started]
        if any(process.returncode for process in started):
            raise SystemExit(f"{name} failed:\n" + "\n".join(outputs))
        results = [json.loads(out.read_text()) for out in outs]
    cpu = [sum(steps) for steps in zip(*(one["cpu"] for one in results), strict=True)]
    return Measured(name, cpu, [max(steps) for steps in zip(*(one["wall"] for one in results), strict=True)])


def _start(name: str, rank: int, ranks: int, port: int, out: Path, args: argparse.Namespace) -> subprocess.Popen[str]:
    place = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": ranks,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "OMP_NUM_THREADS": 1,
        "OMP_WAIT_POLICY": "PASSIVE",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    line = [
        sys.executable,
        __file__,
        "--rank-of",
        name,
        "--out",
        str(out),
        "--precision",
        args.precision,
        "--steps",
        str(args.steps),
        "--seq-len",
        str(args.seq_len),
        "--sequences",
        str(args.sequences),
    ]
    environment = os.environ | {key: str(value) for key, value in place.items()}
    return subprocess.Popen(line, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def train(args: argparse.Namespace) -> dict[str, list[float]]:
    """Train on this rank; return CPU and wall-clock seconds of every step after the warm-up."""
    import torch

    from kumi.nn.cpu_matmul import enable_fast_float32
    from kumi.parallel import (
        build,
        build_mesh,
        clip_gradients,
        close_distributed,
        context_parallel,
        init_adamw,
        init_distributed,
        pipeline,
        unwrap,
    )
    from kumi.spec import families
    from kumi.spec.ledger import decayed_names
    from kumi.spec.optim import Optim
    from kumi.spec.precision import PRECISIONS

    torch.set_num_threads(1)
    enable_fast_float32()
    layout = ROWS[args.rank_of].layout
    # Equally many tokens in a rank's microbatch in every layout.
    layout = replace(layout, microbatch=args.sequences // 2 * layout.cp)
    mesh = build_mesh(layout, init_distributed())
    shape = shapes.W1_EXPERTS if ROWS[args.rank_of].experts else shapes.W1
    spec = families.from_hf(shape | {"max_position_embeddings": args.seq_len})
    model = build(spec, mesh, PRECISIONS[args.precision], weights=0)
    optimizer = init_adamw(unwrap(model).named_parameters(), decayed_names(spec), Optim())
    seconds: dict[str, list[float]] = {"cpu": [], "wall": []}
    for step in range(WARM + args.steps):
        whole = batch(args, spec.vocab_size, step)
        share = args.sequences // layout.dp
        first = layout.dp_index(mesh.rank) * share
        began, wall = _cpu(), time.perf_counter()
        parts = [
            {name: x[start : start + layout.microbatch] for name, x in whole.items()}
            for start in range(first, first + share, layout.microbatch)
        ]
        pipeline.train_microbatches(model, mesh, [context_parallel.shard_sequence(part, mesh) for part in parts])
        clip_gradients(model, 1.0, mesh)
        optimizer.step()
        optimizer.zero_grad()
        if step >= WARM:
            seconds["cpu"].append(_cpu() - began)
            seconds["wall"].append(time.perf_counter() - wall)
    close_distributed()
    return seconds


def batch(args: argparse.Namespace, vocab_size: int, step: int) -> dict:
    """Return the step's random tokens, the same on all ranks."""
    import torch

    random = torch.Generator().manual_seed(step)
    ids, labels = torch.randint(0, vocab_size, (2, args.sequences, args.seq_len), generator=random)
    return {"input_ids": ids, "labels": labels, "token_weights": torch.full(ids.shape, -1.0 / ids.numel())}


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def summary(runs: list[Measured], args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Return for every row the median of its steps per token, the ratio to one process's, and the accepted ratio."""
    ratios: dict[str, dict[str, float]] = {}
    for name in dict.fromkeys(run.row for run in runs):
        steps = [(cpu, wall) for run in runs if run.row == name for cpu, wall in zip(run.cpu, run.wall, strict=True)]
        cpu, wall = (statistics.median(values) / tokens(args) for values in zip(*steps, strict=True))
        alone = ROWS[name].alone
        ratio = cpu / ratios[alone]["cpu_s_per_token"] if alone in ratios else 1.0
        ratios[name] = {"cpu_s_per_token": cpu, "wall_s_per_token": wall, "ratio": ratio, "bar": ROWS[name].bar}
    return ratios


def table(result: dict) -> str:
    """Return the rows as text."""
    lines = [f"{'layout':16} {'CPU s/1000 tokens':>18} {'ratio':>7} {'at most':>8} {'tokens/s':>9}"]
    for name, row in result["rows"].items():
        lines.append(
            f"{name:16} {1e3 * row['cpu_s_per_token']:18.3f} {row['ratio']:7.3f} {row['bar']:8.2f} "
            f"{1 / row['wall_s_per_token']:9.0f}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
