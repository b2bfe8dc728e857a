"""Worker processes that live for a run, and score replies within deadlines."""

from __future__ import annotations

import selectors
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kumi.errors import ConfigError, KumiError
from kumi.json_worker import Answer, JsonWorker, fate

# Seconds that a worker may take to start: user's files may import large packages.
_START_S = 300.0


class Job(NamedTuple):
    """The content of a job for a worker, and the seconds that it may take."""

    content: Mapping[str, Any]
    timeout_s: float


@dataclass
class _Worker:
    """A worker process. `deadline`: the time at which it is ended if it is not done, or not ready.

    `job`: the index of its job; None while it has none.
    """

    process: JsonWorker
    deadline: float
    ready: bool = False
    job: int | None = None


@dataclass
class TimedWorkers:
    """A context with `count` processes `python -m module`; the first line that each reads is `setup`.

    A worker that is ended, at a deadline or by its job, is replaced. Entering the context raises ConfigError if a
    worker refuses `setup`.
    """

    count: int
    module: str
    setup: Mapping[str, Any]
    _workers: list[_Worker] = field(default_factory=list)
    _selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)

    def __enter__(self) -> TimedWorkers:
        try:
            for _ in range(self.count):
                self._start()
            self._await_ready()
        except BaseException:
            self._stop_all()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop_all()

    def run(self, jobs: Sequence[Job]) -> list[Answer]:
        """Return the answer to each job: the worker's, {"timeout": True}, or {"error": reason} if the worker ended."""
        answers: list[Answer | None] = [None] * len(jobs)
        pending = iter(range(len(jobs)))
        unanswered = len(jobs)
        for worker in self._workers:
            self._give(worker, pending, jobs)
        while unanswered:
            for worker, answer in self._events():
                if worker.job is not None and answer:
                    answers[worker.job] = answer
                    unanswered -= 1
                worker.job = None
                if worker in self._workers:
                    self._give(worker, pending, jobs)
        return [answer for answer in answers if answer is not None]

    def _await_ready(self) -> None:
        while not all(worker.ready for worker in self._workers):
            for _ in self._events():
                pass

    def _events(self) -> Iterator[tuple[_Worker, Answer]]:
        """Wait for workers; yield those that became free, each with the answer to its job, or {} if it had no job."""
        busy = [worker for worker in self._workers if worker.job is not None or not worker.ready]
        patience = min(worker.deadline for worker in busy) - time.monotonic()
        for key, _ in self._selector.select(max(0.0, patience)):
            yield from self._read(key.data)
        now = time.monotonic()
        for worker in busy:
            if worker.deadline <= now and worker in self._workers and (worker.job is not None or not worker.ready):
                if not worker.ready:
                    raise KumiError(
                        f"a reward worker was not ready after {_START_S:g} s; make the file of your reward function "
                        "import faster"
                    )
                yield from self._replace(worker, {"timeout": True})

    def _read(self, worker: _Worker) -> Iterator[tuple[_Worker, Answer]]:
        """Read what `worker` has written, or that it has ended; yield it as `_events` does."""
        try:
            answers = worker.process.read()
        except ValueError:
            yield from self._replace(worker, {"error": "the worker's answer was overwritten"})
            return
        if answers is None:
            code = worker.process.wait()
            if not worker.ready:
                raise KumiError(f"a reward worker {fate(code)} while it started; its messages are above")
            yield from self._replace(worker, {"error": f"the worker process {fate(code)}"})
            return
        for answer in answers:
            if "refused" in answer:
                raise ConfigError(answer["refused"])
            worker.ready = True
            yield worker, {} if "ready" in answer else answer

    def _replace(self, worker: _Worker, answer: Answer) -> Iterator[tuple[_Worker, Answer]]:
        """Stop `worker` and start another one in its place; yield the stopped one with `answer` if it had a job."""
        self._selector.unregister(worker.process)
        worker.process.stop()
        self._workers.remove(worker)
        self._start()
        if worker.job is not None:
            yield worker, answer

    def _start(self) -> None:
        worker = _Worker(JsonWorker(self.module), time.monotonic() + _START_S)
        self._workers.append(worker)
        self._selector.register(worker.process, selectors.EVENT_READ, worker)
        worker.process.send(self.setup)

    def _give(self, worker: _Worker, pending: Iterator[int], jobs: Sequence[Job]) -> None:
        """Give `worker` the next job, if it is free and there is one."""
        if not worker.ready or worker.job is not None:
            return
        index = next(pending, None)
        if index is not None:
            worker.job, worker.deadline = index, time.monotonic() + jobs[index].timeout_s
            worker.process.send(jobs[index].content)

    def _stop_all(self) -> None:
        for worker in self._workers:
            worker.process.stop()
        self._workers.clear()
        self._selector.close()
