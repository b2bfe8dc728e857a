"""Score the replies of a step with all rewards of a run."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from kumi.errors import ConfigError, KumiError
from kumi.files.untrusted import brief
from kumi.rewards.code_reward import check_sandbox
from kumi.rewards.function_reward import checked_reward
from kumi.rewards.http_request import RequestError, RequestTimeoutError
from kumi.rewards.judge import judge
from kumi.rewards.length_reward import length_bounds, length_reward
from kumi.rewards.reward_spec import CodeReward, JudgeReward, LengthReward, ModelReward, RewardSpec, check_rewards
from kumi.rewards.sandbox.control_groups import PREFIX, remove_left_groups
from kumi.rewards.timed_workers import Job, TimedWorkers

# The sandbox ends the programs of a code reward at their deadline. The worker that waits for it is ended this many
# seconds later, if the sandbox does not.
_GRACE_S = 30.0


@dataclass(frozen=True)
class RewardRequest:
    """A reply to score.

    row: the row of data of its prompt, with all columns.
    reply_tokens: the number of tokens of the reply.
    truncated: True if the reply ended at the limit of tokens, not by itself.
    """

    prompt: str
    reply: str
    row: Mapping[str, Any]
    reply_tokens: int
    truncated: bool


@dataclass(frozen=True)
class RewardResult:
    """The rewards of a reply, by name, and their weighted sum.

    A part is None if the reward does not apply to the reply (its row has no value in a column that the reward reads, or
    the function returned None), or if it failed. A part that does not apply has no share in the sum. A reward that
    failed makes the sum None, since the reply cannot be compared with others; so does a reply without any part.
    """

    total: float | None
    parts: Mapping[str, float | None]


@dataclass(frozen=True)
class RewardFaults:
    """How often a reward failed since the start, with the first example of each kind.

    timeouts: calls that took more than `timeout_s`.
    exceptions: calls that raised an exception, or returned anything but a finite number or None; replies that a reward
        model cannot read.
    missing: replies whose row has no value in a column that the reward reads.
    """

    timeouts: int = 0
    exceptions: int = 0
    missing: int = 0
    timeout_example: str = ""
    exception_example: str = ""
    missing_example: str = ""


class _Part(NamedTuple):
    """The value of one reward for one reply. fault: "timeouts", "exceptions" or "missing", with a reason, or ""."""

    value: float | None
    fault: str = ""
    reason: str = ""

    @property
    def failed(self) -> bool:
        return self.fault in ("timeouts", "exceptions")


@dataclass(frozen=True)
class Unscored:
    """Stands for the score of a reply that a reward model cannot read, with the reason in a few words."""

    reason: str


# (reward, requests) -> the score of each request by a reward model, which the caller has in memory; None if the reward
# does not apply to it.
ScoreModel = Callable[[ModelReward, Sequence[RewardRequest]], Sequence[float | Unscored | None]]


class RewardScorer:
    """A context that scores replies, and owns the worker processes for it.

    rewards: the rewards of the run.
    folder: paths of files in `rewards` are relative to it.
    workers: number of replies that are scored at a time, each in a process.
    max_new_tokens: the number of tokens that a reply may have.
    score_model: scores replies with a reward model; needed for rewards of kind "model" only.

    Entering it imports the files of functions and tests the sandbox of code. Raise ConfigError if a reward cannot be
    used.
    """

    def __init__(
        self,
        rewards: Sequence[RewardSpec],
        folder: Path,
        workers: int,
        max_new_tokens: int,
        score_model: ScoreModel | None = None,
    ) -> None:
        check_rewards(rewards)
        self._rewards, self._folder, self._workers_count = tuple(rewards), folder, workers
        self._score_model = score_model
        for spec in rewards:
            if isinstance(spec, ModelReward) and score_model is None:
                raise ConfigError(f"reward {spec.name!r}: there is no reward model in memory to score {spec.source!r}")
        self._bounds = {
            spec.name: length_bounds(spec, max_new_tokens) for spec in rewards if isinstance(spec, LengthReward)
        }
        self._judges = {spec.name: judge(spec) for spec in rewards if isinstance(spec, JudgeReward)}
        self._faults = {spec.name: RewardFaults() for spec in rewards}
        self._in_workers = [spec for spec in rewards if spec.in_worker]
        self._stack = ExitStack()
        self._workers: TimedWorkers | None = None

    def __enter__(self) -> RewardScorer:
        groups = f"{PREFIX}{os.getpid()}"
        code_rewards = [spec for spec in self._rewards if isinstance(spec, CodeReward)]
        with self._stack:
            sandboxes = {}
            for spec in code_rewards:
                sandbox = check_sandbox(spec, groups, self._workers_count)
                if sandbox is not None:
                    sandboxes[spec.name] = sandbox.as_json()
                    if sandbox.groups is not None:
                        self._stack.callback(remove_left_groups, sandbox.groups)
            if self._in_workers:
                written = [{"kind": spec.kind, **asdict(spec)} for spec in self._in_workers]
                setup = {"rewards": written, "folder": str(self._folder.resolve()), "sandboxes": sandboxes}
                workers = TimedWorkers(self._workers_count, "kumi.rewards.reward_worker", setup)
                self._workers = self._stack.enter_context(workers)
            # Nothing failed: what was opened stays open until the end of this context.
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def faults(self) -> Mapping[str, RewardFaults]:
        """The faults of each reward so far, by its name."""
        return dict(self._faults)

    def score(self, requests: Sequence[RewardRequest]) -> list[RewardResult]:
        """Return the rewards of the replies of one step, in their order.

        Raise KumiError if a reward failed for all replies that it was asked for, and was asked for at least half of the
        replies. Also raise it if no reply can be scored because of failures and missing columns.
        """
        if not requests:
            return []
        parts = self._parts(requests)
        for spec in self._rewards:
            self._count_faults(spec, requests, parts[spec.name])
        for spec in self._rewards:
            self._check(spec, parts[spec.name])
        results = [self._result({name: column[row] for name, column in parts.items()}) for row in range(len(requests))]
        self._check_scored(results, parts)
        return results

    def _parts(self, requests: Sequence[RewardRequest]) -> dict[str, list[_Part]]:
        """Return the parts of all requests for each reward. Threads ask the judges while worker processes score."""
        parts: dict[str, list[_Part]] = {}
        with ExitStack() as stack:
            judged: dict[str, list[Future[_Part]]] = {}
            for spec in self._rewards:
                if isinstance(spec, JudgeReward):
                    threads = ThreadPoolExecutor(spec.concurrency)
                    stack.callback(threads.shutdown, cancel_futures=True)
                    judged[spec.name] = [threads.submit(self._judge_part, spec, request) for request in requests]
            parts |= self._worker_parts(requests)
            for spec in self._rewards:
                if isinstance(spec, LengthReward):
                    parts[spec.name] = [self._length_part(spec, request) for request in requests]
                elif isinstance(spec, ModelReward):
                    assert self._score_model is not None, "checked at the start"
                    scores = self._score_model(spec, requests)
                    parts[spec.name] = [_model_part(score) for score, _ in zip(scores, requests, strict=True)]
            parts |= {name: [future.result() for future in futures] for name, futures in judged.items()}
        return {spec.name: parts[spec.name] for spec in self._rewards}

    def _worker_parts(self, requests: Sequence[RewardRequest]) -> dict[str, list[_Part]]:
        """Return the parts of the rewards that run in worker processes."""
        parts: dict[str, list[_Part]] = {}
        jobs: list[Job] = []
        places: list[tuple[str, int]] = []
        for index, spec in enumerate(self._in_workers):
            parts[spec.name] = [_missing(spec, request) or _Part(None) for request in requests]
            # The sandbox ends programs at the deadline: a reply whose program takes too long then scores 0.
            timeout_s = spec.timeout_s + (_GRACE_S if isinstance(spec, CodeReward) else 0.0)
            for row, request in enumerate(requests):
                if not parts[spec.name][row].fault:
                    jobs.append(Job({"reward": index, **_content(spec, request)}, timeout_s))
                    places.append((spec.name, row))
        answers = self._workers.run(jobs) if self._workers is not None and jobs else []
        for (name, row), answer in zip(places, answers, strict=True):
            if "value" in answer:
                parts[name][row] = _Part(answer["value"])
            elif "timeout" in answer:
                parts[name][row] = _Part(None, "timeouts", "it took too long")
            else:
                parts[name][row] = _Part(None, "exceptions", str(answer.get("error")))
        return parts

    def _length_part(self, spec: LengthReward, request: RewardRequest) -> _Part:
        # A reply that was cut has all tokens that it may have, however the end of a reply is counted.
        return _Part(-1.0 if request.truncated else length_reward(request.reply_tokens, self._bounds[spec.name]))

    def _judge_part(self, spec: JudgeReward, request: RewardRequest) -> _Part:
        missing = _missing(spec, request)
        if missing is not None:
            return missing
        try:
            return _Part(self._judges[spec.name](request.prompt, request.reply, request.row))
        except RequestTimeoutError as error:
            return _Part(None, "timeouts", str(error))
        except RequestError as error:
            return _Part(None, "exceptions", str(error))

    def _count_faults(self, spec: RewardSpec, requests: Sequence[RewardRequest], parts: Sequence[_Part]) -> None:
        for request, part in zip(requests, parts, strict=True):
            if not part.fault:
                continue
            faults, example = self._faults[spec.name], f"{part.fault.removesuffix('s')}_example"
            changes: dict[str, Any] = {part.fault: getattr(faults, part.fault) + 1}
            if not getattr(faults, example):
                changes[example] = f"{part.reason}; prompt {brief(request.prompt)}, reply {brief(request.reply)}"
            self._faults[spec.name] = replace(faults, **changes)

    def _check(self, spec: RewardSpec, parts: Sequence[_Part]) -> None:
        """Raise KumiError if the reward `spec` failed for all replies that it was asked for, at least half of the
        step."""
        asked = [part for part in parts if part.fault != "missing"]
        if 2 * len(asked) >= len(parts) and all(part.failed for part in asked):
            faults = self._faults[spec.name]
            raise KumiError(
                f"the reward {spec.name!r} failed for all {len(asked)} replies of a step, and so far by "
                f"{faults.exceptions} exceptions and {faults.timeouts} timeouts; for example: "
                f"{faults.exception_example or faults.timeout_example}; correct it, or raise its "
                f"timeout_s={spec.timeout_s:g} if it needs more time"
            )

    def _result(self, parts: Mapping[str, _Part]) -> RewardResult:
        weighted = [(spec.weight, parts[spec.name]) for spec in self._rewards if spec.weight]
        given = [(weight, part.value) for weight, part in weighted if part.value is not None]
        failed = any(part.failed for _, part in weighted)
        total = None if failed or not given else sum(weight * value for weight, value in given)
        return RewardResult(total, {name: part.value for name, part in parts.items()})

    def _check_scored(self, results: Sequence[RewardResult], parts: Mapping[str, Sequence[_Part]]) -> None:
        """Raise KumiError if no reply has a sum of rewards, and a reward had a fault."""
        if any(result.total is not None for result in results):
            return
        faulty = [name for name, column in parts.items() if any(part.fault for part in column)]
        if faulty:
            examples = "; ".join(f"{name}: {self._example(name)}" for name in faulty)
            raise KumiError(
                f"no reply of a step of {len(results)} can be scored; for example, {examples}; correct the rewards or "
                "the data"
            )

    def _example(self, name: str) -> str:
        faults = self._faults[name]
        return faults.exception_example or faults.timeout_example or faults.missing_example


def _missing(spec: RewardSpec, request: RewardRequest) -> _Part | None:
    """Return the part of a request whose row has no value in a column that `spec` reads; None if it has all."""
    absent = next((column for column in spec.columns or () if request.row.get(column) is None), None)
    if absent is None:
        return None
    reason = "is null" if absent in request.row else f"is absent; the row has {', '.join(request.row) or 'no column'}"
    return _Part(None, "missing", f"the column {absent!r} {reason}")


def _content(spec: RewardSpec, request: RewardRequest) -> dict[str, Any]:
    """Return a request as the content of a job. Its row has only the columns that the reward reads."""
    names = request.row if spec.columns is None else spec.columns
    # Values of parquet files that JSON lacks, such as dates, become texts.
    row = json.loads(json.dumps({name: request.row[name] for name in names}, default=str))
    return {"prompt": request.prompt, "reply": request.reply, "row": row}


def _model_part(value: float | Unscored | None) -> _Part:
    """Return the score of a reward model as a part."""
    if isinstance(value, Unscored):
        return _Part(None, "exceptions", value.reason)
    try:
        return _Part(checked_reward(value))
    except (TypeError, ValueError) as error:
        return _Part(None, "exceptions", str(error))
