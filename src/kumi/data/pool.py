"""A pool of worker processes; each worker runs one job at a time."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
from collections.abc import Generator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from kumi.data.row_guard import VARIABLE, Announced, open_announced
from kumi.errors import KumiError

Answer = dict[str, Any]


def run_jobs(
    jobs: Sequence[dict[str, Any]], workers: int, module: str = "kumi.data.tokenize_worker"
) -> Generator[tuple[int, Answer], None, None]:
    """Run `jobs` on `workers` processes; yield (job number, answer) in order of arrival.

    Each job has any number of answers with "progress", then its final answer. Closing the generator stops the workers.
    A worker that ends while it renders a row is replaced, and its job is repeated without the row; see
    `kumi.data.row_guard`. Raise KumiError when a worker ends otherwise.
    """
    with ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())
        pending = iter(range(len(jobs)))
        busy = 0
        for _ in range(min(workers, len(jobs))):
            number = next(pending)
            _begin(number, jobs[number], module, stack, selector)
            busy += 1
        while busy:
            for event, _ in selector.select():
                state = event.data
                answers = _read(state)
                if answers is None:
                    selector.unregister(event.fileobj)
                    _begin(state["job"], _repeated_job(state), module, stack, selector)
                    continue
                for answer in answers:
                    yield state["job"], answer
                    if "progress" in answer:
                        continue
                    next_job = next(pending, None)
                    if next_job is None:
                        selector.unregister(event.fileobj)
                        busy -= 1
                    else:
                        state |= {"job": next_job, "content": jobs[next_job]}
                        _send(state["process"], jobs[next_job])


def _begin(number: int, job: dict[str, Any], module: str, stack: ExitStack, selector: selectors.BaseSelector) -> None:
    """Start a worker with its first job."""
    announced = stack.enter_context(open_announced())
    process = _start(module, stack, announced)
    state = {"process": process, "announced": announced, "job": number, "content": job, "rest": b""}
    _send(process, job)
    selector.register(process.stdout, selectors.EVENT_READ, state)  # type: ignore[arg-type]


def _start(module: str, stack: ExitStack, announced: Announced) -> subprocess.Popen[bytes]:
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    # One thread per worker; the processes run in parallel.
    environment = {**os.environ, "PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false", "OPENBLAS_NUM_THREADS": "1"}
    # A separate process group: Ctrl-C in the terminal reaches only the parent, which stops its workers.
    process = subprocess.Popen(
        [sys.executable, "-m", module],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**environment, VARIABLE: str(announced.number)},
        pass_fds=(announced.number,),
        process_group=0,
    )
    stack.callback(_stop, process)
    return process


def _stop(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin
    assert process.stdout
    process.kill()
    process.wait()
    process.stdout.close()
    try:
        process.stdin.close()
    except BrokenPipeError:
        return  # the worker is dead; unsent bytes are dropped


def _send(process: subprocess.Popen[bytes], job: dict[str, Any]) -> None:
    assert process.stdin
    try:
        process.stdin.write(json.dumps(job).encode() + b"\n")
        process.stdin.flush()
    except BrokenPipeError:
        return  # the worker is dead; the next read of its closed output reports that


def _read(state: dict[str, Any]) -> list[Answer] | None:
    """Read available output of a worker; return its complete answers, or None when the worker is dead."""
    block = os.read(state["process"].stdout.fileno(), 1 << 16)
    if not block:
        return None
    *lines, state["rest"] = (state["rest"] + block).split(b"\n")
    return [json.loads(line) for line in lines]


def _repeated_job(state: dict[str, Any]) -> dict[str, Any]:
    """Return the job of a dead worker without the row that is to blame; raise KumiError if none is."""
    code = state["process"].wait()
    job: dict[str, Any] | None = state["announced"].repeated_job(state["content"], code)
    if job is not None:
        return job
    fate = (
        f"was killed by signal {-code} (9 is often the system running out of memory)"
        if code < 0
        else f"exited with code {code}"
    )
    raise KumiError(f"a data worker {fate}; finished units are kept, run the same command again to continue")
