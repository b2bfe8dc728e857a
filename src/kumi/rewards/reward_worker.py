"""Worker process: score replies with the rewards of a run, one at a time.

`kumi.rewards.timed_workers` runs it as `python -m kumi.rewards.reward_worker`. The first line of its input has the
rewards, the folder of their files and their sandboxes; the worker answers {"ready": true}, or {"refused": sentence} if
a reward cannot be used. Each further line is a reply to score with one reward; the worker answers {"value": number or
null}, or {"error": reason}.
"""

from __future__ import annotations

import json
import os
import signal
import traceback
from pathlib import Path
from typing import Any

from kumi.errors import KumiError
from kumi.rewards.code_reward import code_reward
from kumi.rewards.function_reward import checked_reward, function_reward
from kumi.rewards.reward_spec import (
    BoxedReward,
    CodeReward,
    ExactReward,
    FunctionReward,
    GymReward,
    JsonSchemaReward,
    NumberReward,
    RegexReward,
    RewardSpec,
    spec_from,
)
from kumi.rewards.sandbox.bwrap import BwrapSandbox, sandbox_from
from kumi.rewards.text_rewards import (
    RewardFunction,
    boxed_reward,
    exact_reward,
    json_schema_reward,
    number_reward,
    regex_reward,
)

# Seconds after a job's deadline at which a worker ends by itself: its parent, which would end it before, may be gone.
_ORPHAN_S = 120.0
# The most characters of an exception in an answer.
_LONGEST_ERROR = 1000


def build(spec: RewardSpec, folder: Path, sandbox: BwrapSandbox | None) -> RewardFunction:
    """Return the function of a reward that runs in workers. Raise ConfigError if it cannot be used.

    `folder`: paths are relative to it. `sandbox`: the sandbox of a code reward on this machine, else None.
    """
    match spec:
        case FunctionReward():
            return function_reward(spec, folder)
        case ExactReward():
            return exact_reward(spec)
        case BoxedReward():
            return boxed_reward(spec)
        case NumberReward():
            return number_reward(spec)
        case RegexReward():
            return regex_reward(spec)
        case JsonSchemaReward():
            return json_schema_reward(spec, folder)
        case GymReward():
            # Imported here: few runs have problems of reasoning-gym, and its package takes seconds to import.
            from kumi.rewards.gym_reward import gym_reward

            return gym_reward(spec)
        case CodeReward():
            return code_reward(spec, sandbox)
    raise AssertionError(f"{spec.kind} does not run in a worker")


def _main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    jobs, answers = os.fdopen(os.dup(0), encoding="utf-8"), os.fdopen(os.dup(1), "w", encoding="utf-8")
    # A user's function, and programs that it starts, may read and print, but must not read jobs or print answers.
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)

    def answer(content: dict[str, Any]) -> None:
        answers.write(json.dumps(content) + "\n")
        answers.flush()

    setup = json.loads(jobs.readline() or "null")
    if setup is None:
        return
    try:
        specs = [spec_from(written) for written in setup["rewards"]]
        sandboxes = {name: sandbox_from(fields) for name, fields in setup["sandboxes"].items()}
        functions = [build(spec, Path(setup["folder"]), sandboxes.get(spec.name)) for spec in specs]
    except KumiError as error:
        answer({"refused": str(error)})
        return
    answer({"ready": True})
    for line in jobs:
        job = json.loads(line)
        # Set for each job, because a function may change the timer and its handler.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, specs[job["reward"]].timeout_s + _ORPHAN_S)
        result = _answer_to(functions[job["reward"]], job)
        signal.setitimer(signal.ITIMER_REAL, 0)
        answer(result)


def _answer_to(function: RewardFunction, job: dict[str, Any]) -> dict[str, Any]:
    """Return the worker's answer to `job`, with the reward by `function`."""
    try:
        return {"value": checked_reward(function(job["prompt"], job["reply"], job["row"]))}
    except (Exception, SystemExit) as error:
        return {"error": _one_line(error)}


def _one_line(error: BaseException) -> str:
    """Return the exception `error` as one line, with the place in a user's file where it was raised."""
    places = [
        f" ({Path(call.filename).name}:{call.lineno})"
        for call in traceback.extract_tb(error.__traceback__)
        if Path(__file__).parent not in Path(call.filename).parents
    ]
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text[:_LONGEST_ERROR] + (places[-1] if places else "")


if __name__ == "__main__":
    _main()
