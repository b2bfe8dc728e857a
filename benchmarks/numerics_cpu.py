"""Time all numerics of this CPU, forced in turn, and the ones that kumi chooses by its measurement.

    python benchmarks/numerics_cpu.py [--threads 2] [--only W1 experts ...] [--repeats 3] [--steps 2] [--json FILE]

A row is a training step of one process: forward, backward, clipping, AdamW. With experts, Mamba or long rows the last
two rows are those of benchmarks/bare_loop.py, a plain loop on transformers' model, in a process of its own; for the
other shapes benchmarks/train_cpu.py has them. The rows alternate within a repeat, so that other load on the machine
affects all of them. Numerics whose first step takes three times as long as the best one's are not timed any further,
and bfloat16 not at all if a single matmul takes that much longer than in float32. Prints, for every shape, the seconds
of wall clock and of CPU of each row, and their ratio to those of the chosen numerics: below 1 is faster.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import sys
import tempfile
import time
from itertools import pairwise, product
from pathlib import Path
from statistics import median
from typing import Any

# As in a run: read once, when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import machine
import measure
import shapes
import torch

from kumi.config.numerics import MeasuredNumerics
from kumi.nn.numerics import use_numerics
from kumi.parallel import build, build_mesh, clip_gradients, init_adamw, init_distributed, pipeline
from kumi.parallel import unwrap as unwrapped
from kumi.spec import families
from kumi.spec.layout import Layout
from kumi.spec.ledger import decayed_names
from kumi.spec.numerics import FLASH_CASES, MATMUL_LIBRARIES, Numerics, attention_case
from kumi.spec.optim import Optim
from kumi.spec.precision import PRECISIONS
from kumi.train.measure_numerics import measure_here
from kumi.train.process_memory import keep_freed_memory

HALF = {"hidden_size": 192, "intermediate_size": 512, "num_attention_heads": 3, "num_key_value_heads": 1}
# Shape -> its config.json, rows of a step, tokens a row.
SHAPES: dict[str, tuple[dict[str, Any], int, int]] = {
    "W1": (shapes.W1, 8, 512),
    "half the width": (shapes.W1 | HALF, 8, 512),
    "experts": (shapes.W1_EXPERTS, 8, 512),
    "Mamba": (shapes.W1_MAMBA, 8, 512),
    "rows of 4096": (shapes.W1, 1, 4096),
    "rows of 16384": (shapes.with_layers(shapes.W1, 2), 1, 16384),
    "tiny": (shapes.TINY, 2, 64),
}
TOO_SLOW = 3.0
# Row -> number format of benchmarks/bare_loop.py, and the shapes that have these rows.
BARE = {"bare fp32": "fp32", "bare amp": "amp"}
COMPARED = ("experts", "Mamba", "rows of 16384")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--only",
        nargs="+",
        choices=list(SHAPES),
        default=list(SHAPES)[:-1],
        metavar="SHAPE",
        help=f"shapes to measure: {', '.join(SHAPES)}",
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2, help="steps of a repeat that are timed")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


class Trained:
    """A model in one number format, with its optimizer and batch."""

    def __init__(self, kind: str, config: dict[str, Any], rows: int, length: int) -> None:
        self.mesh = build_mesh(Layout(microbatch=rows), init_distributed())
        spec = families.from_hf(config | {"max_position_embeddings": length})
        self.model = build(spec, self.mesh, PRECISIONS[kind], weights=0)
        self.optimizer = init_adamw(unwrapped(self.model).named_parameters(), decayed_names(spec), Optim())
        ids, labels = torch.randint(0, spec.vocab_size, (2, rows, length))
        self.batch = {"input_ids": ids, "labels": labels, "token_weights": torch.full(ids.shape, -1.0 / ids.numel())}

    def step(self) -> tuple[float, float]:
        """Run a step and return its seconds of wall clock and of CPU."""
        wall, cpu = time.perf_counter(), _cpu()
        pipeline.train_microbatches(self.model, self.mesh, [self.batch])
        clip_gradients(self.model, 1.0, self.mesh)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - wall, _cpu() - cpu


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def slowdown(measured: MeasuredNumerics) -> float:
    """Return the time of a bf16 matmul relative to fp32; 1 if there was no time to measure it."""
    formats = measured.seconds.get("formats")
    return formats["bf16"] / formats["fp32"] if formats else 1.0


def numerics_to_time(measured: MeasuredNumerics, name: str) -> list[Numerics]:
    """Return the chosen numerics, and all others for the shape `name`.

    Only float32 has several kinds of matmuls, and only models with experts have their own."""
    chosen = measured.numerics
    every = [Numerics("fp32", products, flash) for products, flash in product(MATMUL_LIBRARIES, ((), FLASH_CASES))]
    if slowdown(measured) < TOO_SLOW:
        every += [Numerics("bf16", chosen.products, flash) for flash in ((), FLASH_CASES)]
    forced = {_same(way, name): way for way in every}
    return list((forced | {_same(chosen, name): chosen}).values())


def _same(way: Numerics, name: str) -> tuple[str, ...]:
    """Return the settings of `way` that matter to the shape `name`, whose rows have one document each."""
    case = attention_case(4 if way.kind == "fp32" else 2, SHAPES[name][2])
    flash = [case] if case in way.flash else []
    products = way.products if name == "experts" else way.products.replace("mixed", "onednn")
    return way.kind, products if way.kind == "fp32" else "", *flash


def bare(row: str, name: str, args: argparse.Namespace) -> list[tuple[float, float]]:
    """Return the seconds of wall clock and of CPU of the steps of a plain loop in a new process, without its first."""
    config, rows, length = SHAPES[name]
    with tempfile.TemporaryDirectory() as folder:
        model, metrics, log = (Path(folder) / file for file in ("model", "metrics.jsonl", "log.txt"))
        shapes.write_config(config | {"max_position_embeddings": length}, model)
        options = {
            "--model": model,
            "--metrics": metrics,
            "--dtype": BARE[row],
            "--steps": args.steps + 1,
            "--microbatch": rows,
            "--seq-len": length,
        }
        words = [str(word) for pair in options.items() for word in pair]
        done = measure.run(
            [sys.executable, str(Path(__file__).with_name("bare_loop.py")), "--random", *words],
            metrics=metrics,
            env=os.environ,
            log=log,
        )
    if done.returncode != 0:
        raise SystemExit(f"{row}, {name}: exit code {done.returncode}; the end of its output:\n{done.output}")
    return [(after.wall - before.wall, after.cpu - before.cpu) for before, after in pairwise(done.marks)]


def measured_steps(name: str, forced: list[Numerics], args: argparse.Namespace) -> dict[str, list[tuple[float, float]]]:
    """Return the timed steps of each row, by its label; numerics that are too slow have only the first step."""
    models = {kind: Trained(kind, *SHAPES[name]) for kind in dict.fromkeys(way.kind for way in forced)}
    plain = [row for row in BARE if name in COMPARED and (row == "bare fp32" or "bf16" in models)]
    steps_of: dict[str, list[tuple[float, float]]] = {str(way): [] for way in [*forced, *plain]}
    best, hopeless = math.inf, set[str]()
    for repeat in range(args.repeats):
        for way in forced:
            if str(way) in hopeless:
                continue
            use_numerics(way)
            if repeat == 0:
                first = models[way.kind].step()
                if first[0] > TOO_SLOW * best:
                    steps_of[str(way)].append(first)
                    hopeless.add(str(way))
                    continue
                best = min(best, first[0])
            steps_of[str(way)] += [models[way.kind].step() for _ in range(args.steps)]
        for row in plain:
            steps_of[row] += bare(row, name, args)
        print(f"  {name}, repeat {repeat + 1} of {args.repeats}", file=sys.stderr, flush=True)
    return steps_of


def table(name: str, steps_of: dict[str, list[tuple[float, float]]], chosen: str) -> str:
    """Return the medians of all numerics, and their ratios to the chosen one's."""
    medians = {way: [median(each) for each in zip(*steps, strict=True)] for way, steps in steps_of.items()}
    lines = [f"{name}: seconds of a step, wall clock / CPU, and over those of the chosen way"]
    for way, (wall, cpu) in medians.items():
        ratios = f"{wall / medians[chosen][0]:.2f} / {cpu / medians[chosen][1]:.2f}"
        note = "  chosen" if way == chosen else ""
        lines.append(f"  {way:78} {wall:8.3f} / {cpu:7.3f}   {ratios}{note}")
    return "\n".join(lines)


def main() -> None:
    args = arguments()
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    measured = measure_here(1)  # in a process of its own, as at the first start of a run
    torch.set_num_threads(args.threads)
    keep_freed_memory()
    if not measured.complete:
        print("the machine is busy: what could not be measured in time counts as the reference", flush=True)
    times = slowdown(measured)
    print(f"chosen: {measured.numerics}, measured in {measured.measuring_seconds:.2f} s", flush=True)
    print(f"products in bf16 take {times:.1f} times as long as in fp32", flush=True)
    result: dict[str, Any] = {
        "machine": machine.describe(),
        "threads": args.threads,
        "seconds": measured.measuring_seconds,
        "chosen": str(measured.numerics),
        "shapes": {},
    }
    for name in args.only:
        steps_of = measured_steps(name, numerics_to_time(measured, name), args)
        print(table(name, steps_of, str(measured.numerics)), flush=True)
        result["shapes"][name] = steps_of
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
