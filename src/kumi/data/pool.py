"""A pool of worker processes; each worker runs one job at a time."""

from __future__ import annotations

import selectors
from collections.abc import Generator, Sequence
from contextlib import ExitStack
from typing import Any

from kumi.data.row_guard import VARIABLE, open_announced
from kumi.errors import KumiError
from kumi.json_worker import Answer, JsonWorker, fate


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
                answers = state["process"].read()
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
                        state["process"].send(jobs[next_job])


def _begin(number: int, job: dict[str, Any], module: str, stack: ExitStack, selector: selectors.BaseSelector) -> None:
    """Start a worker with its first job.

    The worker announces in the file `announced` which row it renders, so that the row is known if the worker dies.
    """
    announced = stack.enter_context(open_announced())
    process = JsonWorker(module, {VARIABLE: str(announced.descriptor)}, (announced.descriptor,))
    stack.callback(process.stop)
    state = {"process": process, "announced": announced, "job": number, "content": job}
    process.send(job)
    selector.register(process, selectors.EVENT_READ, state)


def _repeated_job(state: dict[str, Any]) -> dict[str, Any]:
    """Return the job of a dead worker without the row that is to blame; raise KumiError if none is."""
    code = state["process"].wait()
    job: dict[str, Any] | None = state["announced"].repeated_job(state["content"], code)
    if job is not None:
        return job
    raise KumiError(f"a data worker {fate(code)}; finished units are kept, run the same command again to continue")
