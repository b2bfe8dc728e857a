"""Jobs to worker processes and answers back, each process with one job at a time."""

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

from kumi.errors import KumiError

Answer = dict[str, Any]


def answers(
    jobs: Sequence[dict[str, Any]], workers: int, module: str = "kumi.data.worker"
) -> Generator[tuple[int, Answer], None, None]:
    """(job number, answer) as they come in: any number of progress answers for a job, then its last one.

    Closing the generator early stops the workers. Raises KumiError when a worker process dies.
    """
    with ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())
        waiting = iter(range(len(jobs)))
        busy = 0
        for _ in range(min(workers, len(jobs))):
            process = _start(module, stack)
            state: dict[str, Any] = {"process": process, "job": next(waiting), "rest": b""}
            _send(process, jobs[state["job"]])
            selector.register(process.stdout, selectors.EVENT_READ, state)  # type: ignore[arg-type]
            busy += 1
        while busy:
            for event, _ in selector.select():
                state = event.data
                for answer in _read(state):
                    yield state["job"], answer
                    if "progress" in answer:
                        continue
                    following = next(waiting, None)
                    if following is None:
                        selector.unregister(event.fileobj)
                        busy -= 1
                    else:
                        state["job"] = following
                        _send(state["process"], jobs[following])


def _start(module: str, stack: ExitStack) -> subprocess.Popen[bytes]:
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    # One thread each: the processes are the parallelism.
    environment = {**os.environ, "PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-m", module]
    # In a group of its own, so that a Ctrl-C in the terminal reaches the program alone, which stops its workers.
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, process_group=0)
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
        return  # what was still to be sent is not wanted any more


def _send(process: subprocess.Popen[bytes], job: dict[str, Any]) -> None:
    assert process.stdin
    try:
        process.stdin.write(json.dumps(job).encode() + b"\n")
        process.stdin.flush()
    except BrokenPipeError:
        return  # the worker is dead; its closed output says so at the next read


def _read(state: dict[str, Any]) -> list[Answer]:
    block = os.read(state["process"].stdout.fileno(), 1 << 16)
    if not block:
        code = state["process"].wait()
        how = (
            f"was killed by signal {-code} (9 is often the system short of memory)"
            if code < 0
            else f"ended with {code}"
        )
        raise KumiError(f"a data worker {how}; finished units are kept, run the same command again to continue")
    *lines, state["rest"] = (state["rest"] + block).split(b"\n")
    return [json.loads(line) for line in lines]
