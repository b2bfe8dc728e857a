"""Kill random ranks and launchers at random moments, also during saves, and check that resumed runs lose nothing.

    python benchmarks/kill_storm.py [--kills 40] [--only DDP tp ...] [--seed 0] [--json FILE] [--work FOLDER]

Every layout trains the same model. An uninterrupted run is the reference. The same command is then started and killed
repeatedly, each time with another victim and moment, until its share of the kills is done. Checks after every kill: no
process remains, the newest complete checkpoint still exists, and the next start resumes from it. Checks at the end:
losses and final weights equal those of the uninterrupted run bit for bit, and no file remains in the temporary folder
or in /dev/shm. The exit code is 1 if any check fails.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import machine
import tomli_w
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from kumi.storage.folders import latest, step_folder, step_of
from kumi.train.metrics import read_metrics

LAYOUTS: dict[str, dict[str, int]] = {
    "DDP": {"dp_replicate": 2},
    "ZeRO-3": {"dp_shard": 2, "zero": 3},
    "tp": {"tp": 2},
    "pp": {"pp": 2},
    "ZeRO-3 x tp": {"dp_shard": 2, "zero": 3, "tp": 2},
}
STEPS, EVERY = 60, 3
MODEL = {
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 256,
    "intermediate_size": 512,
    "rms_norm_eps": 1e-5,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
# Moments of kills: while the command starts, while ranks build and restore, while they train, while they save.
MOMENTS = ("start", "ranks", "training", "save")
PATIENCE_S = 300.0
TORCH_CACHE = "torchinductor_"


@dataclass
class Kill:
    """One kill of `victim` ("launcher" or "rank N"); `in_save`: during the writing of a checkpoint."""

    layout: str
    moment: str
    victim: str
    step: int
    in_save: bool
    checkpoint: int | None
    exit_code: int
    resumed_after: int | None = None


@dataclass
class Outcome:
    """The kills of a layout, and failed checks as sentences."""

    layout: str
    kills: list[Kill] = field(default_factory=list)
    same_losses: bool = True
    same_weights: bool = True
    faults: list[str] = field(default_factory=list)
    seconds: float = 0.0


class Command:
    """`kumi train` in `folder`, in a session of its own; all its processes have `mark` in their environment."""

    def __init__(self, folder: Path, temporary: Path) -> None:
        self.mark = f"KUMI_STORM={uuid.uuid4().hex}"
        name, value = self.mark.split("=")
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(temporary), name: value}
        self.output = folder / "output.txt"
        with open(self.output, "w") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "kumi.cli", "train", "run.toml"],
                cwd=folder,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env=environment,
            )

    def ranks(self) -> list[int]:
        """Return the process ids of the ranks, in order: the children of the launcher."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        with contextlib.suppress(OSError):
            return sorted(int(word) for word in children.read_text().split())
        return []

    def remaining(self) -> list[int]:
        """Return the ids of the remaining processes of this command."""
        pids = []
        for environ in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if self.mark.encode() in environ.read_bytes():
                    pids.append(int(environ.parent.name))
        return pids

    def end(self) -> None:
        """Kill the remaining processes."""
        for pid in self.remaining():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


@contextlib.contextmanager
def training(folder: Path, temporary: Path) -> Iterator[Command]:
    command = Command(folder, temporary)
    try:
        yield command
    finally:
        command.end()


def write_run(folder: Path, layout: dict[str, int]) -> None:
    """Write the run file and its data into the new `folder`."""
    folder.mkdir(parents=True)
    draw = random.Random(0)
    words = [f"word{number}" for number in range(50)]
    texts = (" ".join(draw.choices(words, k=draw.randrange(5, 60))) for _ in range(200))
    (folder / "documents.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    ranks = 1
    for name, degree in layout.items():
        ranks *= 1 if name == "zero" else degree
    run = {
        "name": "storm",
        "model": {"init": "random", "config": MODEL},
        "cluster": {"devices_per_node": ranks},
        "batch": {"seq_len": 32, "tokens_per_step": 256},
        "data": {
            "tokenizer": {"vocab_size": 300},
            "validation": 0.1,
            "workers": 1,
            "sources": [{"path": "documents.jsonl"}],
        },
        "optim": {"lr": 1e-2, "warmup_steps": 2},
        "precision": {"kind": "fp32"},
        "layout": layout,
        "train": {"steps": STEPS, "out": "run"},
        "checkpoint": {"every": EVERY, "keep": 2},
        "log": {"every": 1},
    }
    (folder / "run.toml").write_text(tomli_w.dumps(run))


def last_step(folder: Path) -> int:
    return max((entry["step"] for entry in read_metrics(folder / "run" / "metrics.jsonl")), default=0)


def newest(folder: Path) -> int | None:
    """Return the step of the newest complete checkpoint."""
    folder_of_step = latest(folder / "run" / "checkpoints")
    return None if folder_of_step is None else step_of(folder_of_step)


def is_saving(root: Path, since: float) -> bool:
    """Return True while a command that was started at `since` writes a checkpoint under `root`."""
    for folder in root.glob("step_*.tmp"):
        with contextlib.suppress(FileNotFoundError):  # it was renamed
            if folder.stat().st_mtime > since:
                return True
    return False


def losses(folder: Path) -> list[tuple[int, str]]:
    """Return step and loss, bit for bit, of every line of the metrics; a repeated step is there twice."""
    entries = read_metrics(folder / "run" / "metrics.jsonl")
    return [(entry["step"], float(entry["train/loss"]).hex()) for entry in entries if "train/loss" in entry]


def weights(folder: Path) -> str:
    """Return a digest of the exported weights, and of all tensors of the last checkpoint."""
    digest = hashlib.sha256()
    last = step_folder(folder / "run" / "checkpoints", STEPS)
    for file in (folder / "run" / "hf" / "model.safetensors", *sorted(last.glob("*.safetensors"))):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def finish(folder: Path, temporary: Path) -> str:
    """Run the command to its end and return its output. Raise RuntimeError if it fails."""
    with training(folder, temporary) as command:
        try:
            code: int | None = command.process.wait(timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            code = None
        if code != 0:
            raise RuntimeError(f"the command ended with {code}: {command.output.read_text()[-2000:]}")
        return command.output.read_text()


def resumed_after(text: str) -> int | None:
    """Return the step after which a command that printed `text` resumed; None if it did not resume."""
    step = text.partition("resumed after step ")[2].split(" ", 1)[0]
    return int(step) if step.isdecimal() else None


def kill_once(folder: Path, temporary: Path, layout: str, draw: random.Random, outcome: Outcome) -> bool:
    """Start the command and kill it; return False if it ended before."""
    moment, root, started = draw.choice(MOMENTS), folder / "run" / "checkpoints", time.time()
    before = newest(folder)
    with training(folder, temporary) as command:
        ready: Callable[[], bool] = lambda: len(command.ranks()) >= 2  # noqa: E731
        begun = last_step(folder)
        if moment == "training":
            ready = lambda: last_step(folder) > begun  # noqa: E731
        if moment == "save":  # after the preflight check, which saves into another folder
            ready = lambda: is_saving(root, started) and last_step(folder) > begun  # noqa: E731
        if moment != "start" and not _wait(ready, command.process):
            return False
        if moment != "save":
            time.sleep(draw.uniform(0.0, 3.0))
        ranks = command.ranks()
        # Short-lived children of a starting command are not ranks, but may be killed, too.
        number = draw.randrange(-1, len(ranks))
        pid, victim = (command.process.pid, "launcher") if number < 0 else (ranks[number], f"rank {number}")
        in_save, step, checkpoint = is_saving(root, started), last_step(folder), newest(folder)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        try:
            code = command.process.wait(timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            outcome.faults.append(f"{layout}: the command did not end after the kill of {victim} at step {step}")
            return True
        if code == 0:
            return False
        kill = Kill(
            layout,
            moment,
            victim,
            step,
            in_save,
            checkpoint,
            code,
            resumed_after=resumed_after(command.output.read_text()),
        )
        _check_resumed(kill, before, outcome)
        outcome.kills.append(kill)
        until = time.monotonic() + 30
        while command.remaining() and time.monotonic() < until:
            time.sleep(0.05)
        outcome.faults += [f"{layout}: process {pid} outlived the kill of {victim}" for pid in command.remaining()]
        if (newest(folder) or 0) < (checkpoint or 0):
            outcome.faults.append(f"{layout}: checkpoint {checkpoint} is gone after the kill of {victim}")
        expected = -signal.SIGKILL if victim == "launcher" else 7
        if code != expected and moment != "start":
            outcome.faults.append(
                f"{layout}: exit code {code} after the kill of {victim}, not {expected}: "
                f"{command.output.read_text()[-300:]}"
            )
    return True


def _check_resumed(kill: Kill, before: int | None, outcome: Outcome) -> None:
    """Add a fault if a command resumed from another checkpoint than the newest."""
    if kill.resumed_after is not None and kill.resumed_after != before:
        outcome.faults.append(f"{kill.layout}: went on after step {kill.resumed_after}, not {before}")


def _wait(ready: Callable[[], bool], process: subprocess.Popen[bytes]) -> bool:
    """Return True if `ready()` became true before the process ended."""
    until = time.monotonic() + PATIENCE_S
    while not ready():
        if process.poll() is not None or time.monotonic() > until:
            return False
        time.sleep(0.005)
    return True


def storm(layout: str, kills: int, seed: int, work: Path, killed: Callable[[], None]) -> Outcome:
    """Kill runs on `layout` `kills` times, and compare with an undisturbed run. A new run follows a run that ends."""
    began, outcome, draw = time.monotonic(), Outcome(layout), random.Random(f"{seed} {layout}")
    base, temporary = work / layout.replace(" ", "_"), work / "tmp"
    write_run(base / "uninterrupted", LAYOUTS[layout])
    finish(base / "uninterrupted", temporary)
    while len(outcome.kills) < kills and not outcome.faults:
        folder = base / f"storm-{len(outcome.kills)}"
        write_run(folder, LAYOUTS[layout])
        while len(outcome.kills) < kills and not outcome.faults:
            if not kill_once(folder, temporary, layout, draw, outcome):
                break
            killed()
        before = newest(folder)
        after = resumed_after(finish(folder, temporary))
        if before not in (after, STEPS):
            outcome.faults.append(f"{layout}: the last start went on after step {after}, not {before}")
        outcome.same_losses &= losses(folder) == losses(base / "uninterrupted")
        outcome.same_weights &= weights(folder) == weights(base / "uninterrupted")
        left = [
            str(path)
            for path in (folder / "run").rglob("*")
            if path.name.startswith(".launch-") or path.suffix == ".tmp"
        ]
        outcome.faults += [f"{layout}: {path} was left" for path in left]
    if not (outcome.same_losses and outcome.same_weights):
        outcome.faults.append(f"{layout}: losses or weights differ from those of the uninterrupted run")
    outcome.seconds = round(time.monotonic() - began, 1)
    return outcome


def leftovers(temporary: Path, shared_before: set[str]) -> list[str]:
    """Return the remaining files in the temporary folder, except torch's cache, and lasting new files in /dev/shm."""
    until = time.monotonic() + 30  # semaphores of other programs come and go
    while shared_memory() - shared_before and time.monotonic() < until:
        time.sleep(0.2)
    paths = [str(path) for path in temporary.iterdir() if not path.name.startswith(TORCH_CACHE)]
    return paths + [f"/dev/shm/{name}" for name in sorted(shared_memory() - shared_before)]


def shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm"))


def kills_per_layout(kills: int, names: list[str]) -> dict[str, int]:
    """Distribute `kills` over the layouts as evenly as possible."""
    return {name: kills // len(names) + (number < kills % len(names)) for number, name in enumerate(names)}


def summary(outcomes: list[Outcome], left: list[str], seed: int) -> dict[str, Any]:
    """Return the results of all layouts, for JSON."""
    kills = [kill for outcome in outcomes for kill in outcome.kills]
    faults = [fault for outcome in outcomes for fault in outcome.faults] + [f"{name} was left" for name in left]
    return {
        "machine": machine.describe(),
        "seed": seed,
        "kills": len(kills),
        "kills_in_saves": sum(kill.in_save for kill in kills),
        "kills_of_launchers": sum(kill.victim == "launcher" for kill in kills),
        "faults": faults,
        "layouts": [asdict(outcome) for outcome in outcomes],
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument(
        "--only",
        nargs="+",
        choices=list(LAYOUTS),
        default=list(LAYOUTS),
        metavar="LAYOUT",
        help=f"layouts: {', '.join(LAYOUTS)}",
    )
    parser.add_argument("--seed", type=int, default=0, help="of victims and moments")
    parser.add_argument("--json", metavar="FILE", help="write every kill and what came of it")
    parser.add_argument("--work", metavar="FOLDER", help="keep the runs in this new folder; default: a temporary one")
    args = parser.parse_args(argv)
    work = Path(args.work or tempfile.mkdtemp(prefix="kill-storm-")).absolute()
    (work / "tmp").mkdir(parents=True)
    shared_before, outcomes = shared_memory(), []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=args.kills)
        for layout, kills in kills_per_layout(args.kills, args.only).items():
            bar.update(task, description=layout)
            outcomes.append(storm(layout, kills, args.seed, work, lambda: bar.advance(task)))
    result = summary(outcomes, leftovers(work / "tmp", shared_before), args.seed)
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1) + "\n")
    for outcome in outcomes:
        in_saves = sum(kill.in_save for kill in outcome.kills)
        print(
            f"{outcome.layout:12} {len(outcome.kills):3} kills, {in_saves:2} in saves, {outcome.seconds:6.0f} s: "
            f"losses {'equal' if outcome.same_losses else 'DIFFER'}, "
            f"weights {'equal' if outcome.same_weights else 'DIFFER'}"
        )
    print(*result["faults"] or ["nothing lost, nothing left"], sep="\n")
    if not args.work and not result["faults"]:
        shutil.rmtree(work)
    return int(bool(result["faults"]))


if __name__ == "__main__":
    sys.exit(main())
