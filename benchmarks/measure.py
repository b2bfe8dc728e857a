"""Run a command and measure it from outside, in the same way for every trainer.

    run(command, metrics=FILE)  ->  Measured: the end of each step, the CPU seconds spent until then, peak memory

CPU time and memory are the kernel's figures for the whole tree of processes (Linux, /proc). A step ends when its line
appears in the JSONL file that the command writes; the file is looked at every 20 ms.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median

TICKS = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")
_POLL = 0.02
_RESCAN = 0.2
_PSS_EVERY = 0.5
_STEP_KEYS = ("step", "train/step")
_LOSS_KEYS = ("loss", "train/loss")


@dataclass(frozen=True)
class Mark:
    """The end of a step: its number and loss, and the wall and CPU seconds since the command started."""

    step: int
    loss: float
    wall: float
    cpu: float


@dataclass(frozen=True)
class Measured:
    """The measurements of one command. Memory in bytes.

    `peak_rss` and `peak_pss` are the largest sums over the process tree at one moment; PSS counts a page that n
    processes share as 1/n in each. `largest_rss` is the peak of the largest single process.
    """

    marks: tuple[Mark, ...]
    wall: float
    cpu: float
    peak_rss: int
    peak_pss: int
    largest_rss: int
    returncode: int
    output: str

    def first_step(self) -> Mark:
        """Return the end of the first step."""
        return self.marks[0]

    def steady(self, drop: int) -> Steady:
        """Return seconds a step over the steps after the first `drop`."""
        if len(self.marks) < drop + 2:
            raise ValueError(f"{len(self.marks)} steps were seen; with {drop} dropped at least {drop + 2} are needed")
        marks = self.marks[drop - 1 :] if drop else self.marks
        walls = [after.wall - before.wall for before, after in pairwise(marks)]
        steps = len(marks) - 1
        return Steady(
            median(walls), (marks[-1].wall - marks[0].wall) / steps, (marks[-1].cpu - marks[0].cpu) / steps, steps
        )

    def losses(self) -> list[float]:
        return [mark.loss for mark in self.marks]


@dataclass(frozen=True)
class Steady:
    """Seconds a step: the median and mean by the wall clock, and the mean CPU seconds, over `steps` steps."""

    median_wall: float
    wall: float
    cpu: float
    steps: int


@dataclass
class _Tree:
    """The live processes under `root`, refreshed now and then, and the peaks seen."""

    root: int
    pids: set[int] = field(default_factory=set)
    peak_rss: int = 0
    peak_pss: int = 0
    largest_rss: int = 0
    cpu: float = 0.0

    def rescan(self) -> None:
        self.pids = {self.root} | descendants(self.root)
        for pid in self.pids:
            self.largest_rss = max(self.largest_rss, peak_of_process(pid))

    def sample(self) -> None:
        """Add up CPU seconds (live processes and the children they reaped) and resident memory."""
        stats = [stat for stat in map(_stat, list(self.pids)) if stat]
        # A process that just ended and is not yet counted in its parent must not make the sum go back.
        self.cpu = max(self.cpu, sum(cpu for cpu, _ in stats))
        self.peak_rss = max(self.peak_rss, sum(rss for _, rss in stats))

    def sample_pss(self) -> None:
        self.peak_pss = max(self.peak_pss, sum(_pss(pid) for pid in list(self.pids)))


def _read(path: str) -> str:
    """Return the text of a /proc file, empty if its process is gone."""
    try:
        with open(path) as file:
            return file.read()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return ""


def _stat(pid: int) -> tuple[float, int] | None:
    """Return CPU seconds, with those of reaped children, and resident bytes of `pid`; None if it is gone."""
    text = _read(f"/proc/{pid}/stat")
    if not text:
        return None
    fields = text[text.rindex(")") + 2 :].split()  # fields[0] is the third field of proc(5), the state
    return sum(map(int, fields[11:15])) / TICKS, int(fields[21]) * PAGE


def _status_bytes(pid: int, key: str) -> int:
    for line in _read(f"/proc/{pid}/status").splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    return 0


def peak_of_process(pid: int) -> int:
    """Return the peak resident bytes of `pid` so far, 0 if it is gone."""
    return _status_bytes(pid, "VmHWM")


def _pss(pid: int) -> int:
    for line in _read(f"/proc/{pid}/smaps_rollup").splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0


def descendants(root: int) -> set[int]:
    """Return the process ids below `root`, at any depth."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (text := _read(f"/proc/{name}/stat")):
            children.setdefault(int(text[text.rindex(")") + 2 :].split()[1]), []).append(int(name))
    pids: set[int] = set()
    pending = [root]
    while pending:
        for pid in children.get(pending.pop(), []):
            pids.add(pid)
            pending.append(pid)
    return pids


class _Lines:
    """The complete JSON lines that have appeared in a growing file since last asked."""

    def __init__(self, path: Path) -> None:
        self.path, self.offset = path, 0

    def new(self) -> list[dict]:
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            file.seek(self.offset)
            text = file.read()
        end = text.rfind(b"\n") + 1
        self.offset += end
        return [json.loads(line) for line in text[:end].splitlines() if line.strip()]


def step_and_loss(line: Mapping) -> tuple[int, float] | None:
    """Return step number and training loss of a metrics line; None if the line has neither."""
    step = next((line[key] for key in _STEP_KEYS if key in line), None)
    loss = next((line[key] for key in _LOSS_KEYS if key in line), None)
    return None if step is None or loss is None else (int(step), float(loss))


def run(command: Sequence[str], *, metrics: Path, env: Mapping[str, str], log: Path, limit: float = 600.0) -> Measured:
    """Run `command` with exactly `env` and measure it; its output goes to the file `log`.

    The command is killed after `limit` seconds. A non-zero return code is reported, not raised.
    """
    if not sys.platform.startswith("linux"):
        raise SystemExit("the CPU benchmark reads /proc and needs Linux")
    metrics.unlink(missing_ok=True)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        began = time.monotonic()
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=dict(env))
    tree = _Tree(process.pid)
    try:
        marks, status, usage = _watch(tree, _Lines(metrics), began, limit)
    except BaseException:
        _kill(tree)
        raise
    process.returncode = os.waitstatus_to_exitcode(status)
    return Measured(
        marks=tuple(marks),
        wall=time.monotonic() - began,
        cpu=usage.ru_utime + usage.ru_stime,
        peak_rss=tree.peak_rss,
        peak_pss=tree.peak_pss,
        largest_rss=tree.largest_rss,
        returncode=process.returncode,
        output=log.read_text(errors="replace")[-4000:],
    )


def _watch(tree: _Tree, lines: _Lines, began: float, limit: float) -> tuple[list[Mark], int, resource.struct_rusage]:
    """Return the steps until the root process ended, its wait status and the kernel's counts for it."""
    marks: list[Mark] = []
    scanned = weighed = float("-inf")
    while True:
        now = time.monotonic()
        if now - scanned > _RESCAN:
            tree.rescan()
            scanned = now
        if now - weighed > _PSS_EVERY:
            tree.sample_pss()
            weighed = now
        tree.sample()
        pid, status, usage = os.wait4(tree.root, os.WNOHANG)
        for line in lines.new():
            if parsed := step_and_loss(line):
                marks.append(Mark(*parsed, time.monotonic() - began, tree.cpu))
        if pid:
            return marks, status, usage
        if now - began > limit:
            _kill(tree)
        time.sleep(_POLL)


def _kill(tree: _Tree) -> None:
    """Kill the tree's processes, children first so that every one has a parent that waits for it."""
    for pid in sorted({tree.root} | descendants(tree.root), reverse=True):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
