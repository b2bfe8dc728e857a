"""Compare pipeline bubbles measured on CPU processes with the planner's simulation.

    python benchmarks/pipeline_bubble.py [--only "1f1b 4" ...] [--steps 8] [--json FILE]

Two processes train a model of equal stages (a small vocabulary, so that embedding and head weigh little) under every
schedule; a row is a schedule and its microbatches. The bubble is the share of a step in which ranks wait. It
is simulated with the medians of the measured seconds of each stage's forwards and backwards, and messages that take no
time. The shortest step counts, because other load on the machine only makes steps longer; on fewer cores than
processes the figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import socket
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import machine
import shapes

from kumi.plan.pipeline.timeline import Timeline, simulate
from kumi.spec.layout import Layout
from kumi.spec.schedule import actions, stage_assignment

WARM, BAR = 2, 0.15
STAGES = {"1f1b": 1, "gpipe": 1, "interleaved": 2, "zb-h1": 1, "zb-h2": 1, "zb-v": 2, "dualpipe": 2}
# "schedule microbatches"; one microbatch is model parallelism without a pipeline.
ROWS = (
    "1f1b 1",
    "1f1b 2",
    "1f1b 4",
    "1f1b 8",
    "gpipe 4",
    "interleaved 4",
    "zb-h1 4",
    "zb-h2 4",
    "zb-v 4",
    "dualpipe 4",
)
SHAPE = shapes.TINY | {
    "vocab_size": 64,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
ROWS_OF_TOKENS, SEQ_LEN = 2, 128


@dataclass(frozen=True)
class Bubble:
    """The share of a step in which ranks wait, measured and simulated, and seconds of the step."""

    row: str
    measured: float
    simulated: float
    seconds: float
    simulated_seconds: float

    @property
    def error(self) -> float:
        return self.measured / self.simulated - 1


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument(
        "--only", nargs="+", choices=ROWS, default=ROWS, metavar="ROW", help=f"rows to measure: {', '.join(ROWS)}"
    )
    parser.add_argument("--steps", type=int, default=8, help=f"steps of every row, after {WARM} that are not counted")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    if args.out:
        train(args)
        return
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "timelines"
        run_ranks(out, args)
        timelines: dict[str, list[Timeline]] = pickle.loads(out.read_bytes())
    bubbles = [bubble(row, steps) for row, steps in timelines.items()]
    print(table(bubbles))
    if args.json:
        rows = [vars(one) | {"error": one.error} for one in bubbles]
        args.json.write_text(json.dumps({"machine": machine.describe(), "bar": BAR, "rows": rows}, indent=1) + "\n")


def layout_of(row: str) -> tuple[Layout, int]:
    """Return the layout of a row, and its microbatches."""
    schedule, microbatches = row.split()
    return Layout(pp=2, schedule=schedule, stages=STAGES[schedule]), int(microbatches)


def run_ranks(out: Path, args: argparse.Namespace) -> None:
    """Run two processes that measure all rows. Raise SystemExit with their output if one fails."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    line = [sys.executable, __file__, "--out", str(out), "--steps", str(args.steps), "--only", *args.only]
    started = []
    for rank in range(2):
        place = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": 2,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "OMP_NUM_THREADS": 1,
            "OMP_WAIT_POLICY": "PASSIVE",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        environment = os.environ | {key: str(value) for key, value in place.items()}
        started.append(
            subprocess.Popen(line, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
    outputs = [process.communicate()[0] for process in started]
    if any(process.returncode for process in started):
        raise SystemExit("\n".join(outputs))


def train(args: argparse.Namespace) -> None:
    """Train every row on this rank; the first rank writes the actions of all in every step after the warm-up."""
    import torch

    from kumi.parallel import build, build_mesh, close_distributed, init_adamw, init_distributed, pipeline, unwrap
    from kumi.parallel.pipeline_trace import gather_timeline, start_trace
    from kumi.spec import families
    from kumi.spec.ledger import decayed_names
    from kumi.spec.optim import Optim
    from kumi.spec.precision import PRECISIONS

    torch.set_num_threads(1)
    place, spec = init_distributed(), families.from_hf(SHAPE)
    timelines: dict[str, list[Timeline]] = {}
    for row in args.only:
        layout, microbatches = layout_of(row)
        mesh = build_mesh(layout, place)
        model = build(spec, mesh, PRECISIONS["fp32"], weights=0)
        optimizer = init_adamw(unwrap(model).named_parameters(), decayed_names(spec), Optim())
        ids = torch.randint(0, spec.vocab_size, (ROWS_OF_TOKENS, SEQ_LEN))
        inputs = {"input_ids": ids, "labels": ids, "token_weights": torch.full(ids.shape, -1.0 / ids.numel())}
        timelines[row] = []
        for step in range(WARM + args.steps):
            record = start_trace(mesh)
            pipeline.train_microbatches(model, mesh, [inputs] * microbatches, record)
            timeline = gather_timeline(record, mesh)
            if timeline is not None and step >= WARM:
                timelines[row].append(timeline)
            optimizer.zero_grad()
    if place.rank == 0:
        args.out.write_bytes(pickle.dumps(timelines))
    close_distributed()


def bubble(row: str, timelines: list[Timeline]) -> Bubble:
    """Return the bubble of the shortest of `timelines`, and that of a simulation with each stage's own seconds."""
    layout, microbatches = layout_of(row)
    best = min(timelines, key=lambda timeline: timeline.seconds)
    lists = actions(layout.schedule, layout.pp, layout.stages, microbatches)
    stage_ranks = stage_assignment(layout.schedule, layout.pp, layout.stages)
    simulated = simulate(lists, stage_ranks, [_durations(best, stage) for stage in range(layout.pp * layout.stages)])
    return Bubble(row, _waiting(best), _waiting(simulated), best.seconds, simulated.seconds)


def _durations(timeline: Timeline, stage: int) -> tuple[float, float, float]:
    """Return median seconds of a forward, of the input gradients and of the weight gradients of a stage."""
    forward, whole, inputs, weights = (_median(timeline, stage, kind) for kind in "FBIW")
    return (forward, inputs, weights) if inputs else (forward, whole / 2, whole / 2)


def _median(timeline: Timeline, stage: int, kind: str) -> float:
    """Return median seconds of a stage's actions of `kind`; 0 if there are none."""
    took = [span.end - span.start for rank in timeline.spans for span in rank if span.action[:2] == (kind, stage)]
    return statistics.median(took) if took else 0.0


def _waiting(timeline: Timeline) -> float:
    """Return the share of the time that ranks wait, on average."""
    return sum(timeline.idle) / len(timeline.idle) / timeline.seconds


def table(bubbles: list[Bubble]) -> str:
    lines = ["| row | bubble | simulated | difference | step | simulated |", "|---|---|---|---|---|---|"]
    lines += [
        f"| {one.row} | {one.measured:.1%} | {one.simulated:.1%} | {one.error:+.0%} | {one.seconds:.3f} s | "
        f"{one.simulated_seconds:.3f} s |"
        for one in bubbles
    ]
    worst = max(abs(one.error) for one in bubbles)
    return "\n".join([*lines, "", f"largest difference {worst:.0%}; at most {BAR:.0%} is wanted"])


if __name__ == "__main__":
    main()
