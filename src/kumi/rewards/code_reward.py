"""The code reward: runs the last code block of a reply with the tests of its row, in a sandbox."""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

from kumi.errors import ConfigError
from kumi.files import untrusted
from kumi.files.untrusted import brief
from kumi.rewards.reward_spec import CodeReward
from kumi.rewards.sandbox.bwrap import BwrapSandbox, open_bwrap
from kumi.rewards.sandbox.control_groups import remove_left_groups
from kumi.rewards.sandbox.interpreter import interpreter_at
from kumi.rewards.sandbox.probes import check_isolation
from kumi.rewards.sandbox.program_run import ProgramLimits, RunProgram
from kumi.rewards.sandbox.sandbox_service import check_service, open_service
from kumi.rewards.text_rewards import RewardFunction, RowError

# A fence of three or more backticks or tildes at the beginning of a line, up to one that is at least as long.
_BLOCK = re.compile(r"^[ ]{0,3}(`{3,}|~{3,})[^\n`]*\n(.*?)^[ ]{0,3}\1[`~]*[ \t]*$", re.DOTALL | re.MULTILINE)

# Runs the code of a reply, then one test after the other, and prints the index of each test that passes, after a secret
# word: the code, which does not know the word, can then not report that a test passes. What the code prints is dropped.
_ASSERT_RUNNER = """
import json, os, sys
job = json.loads(sys.stdin.read())
verdicts = os.fdopen(os.dup(1), "w")
nothing = os.open(os.devnull, os.O_RDWR)
for handle in (0, 1, 2):
    os.dup2(nothing, handle)
names = {"__name__": "reply"}
try:
    exec(compile(job["code"], "reply", "exec"), names)
    for number, test in enumerate(job["tests"]):
        try:
            exec(compile(test, "test", "exec"), names)
        except BaseException:
            if job["all"]:
                break
        else:
            verdicts.write("%s %d\\n" % (job["word"], number))
            verdicts.flush()
finally:
    os._exit(0)
"""


def limits_of(spec: CodeReward) -> ProgramLimits:
    """Return the limits of a program of `spec`, in bytes and processes."""
    return ProgramLimits(spec.memory_mb << 20, spec.processes, spec.files_mb << 20, spec.output_kb << 10)


def check_sandbox(spec: CodeReward, groups: str, workers: int) -> BwrapSandbox | None:
    """Return the sandbox on this machine for programs of `spec`, after its self-test; None if `spec` names a service.

    Raise ConfigError if this machine has no safe sandbox, or if the service does not run programs.

    `groups`: the prefix of the names of control groups. `workers`: number of programs that run at a time.
    """
    try:
        if spec.service:
            check_service(spec.service, open_service(spec.service, limits_of(spec), spec.key_variable))
            return None
        sandbox = open_bwrap(limits_of(spec), interpreter_at(spec.python), groups, workers)
        if sandbox.groups is not None:
            remove_left_groups(sandbox.groups)
        check_isolation(sandbox)
        return sandbox
    except ConfigError as error:
        raise ConfigError(f"reward {spec.name!r}: {error}") from None


def code_reward(spec: CodeReward, sandbox: BwrapSandbox | None) -> RewardFunction:
    """Return the reward for the code of a reply. `sandbox`: the result of `check_sandbox`."""
    run = open_service(spec.service, limits_of(spec), spec.key_variable) if sandbox is None else sandbox.run

    def reward(prompt: str, reply: str, row: Mapping[str, Any]) -> float:
        code = last_block(reply)
        if spec.tests == "assert":
            statements = _statements(row[spec.column], spec.column)
            passed, count = _passed_asserts(code, statements, spec, run), len(statements)
        else:
            pairs = _pairs(row[spec.column], spec.column)
            passed, count = _passed_pairs(code, pairs, spec, run), len(pairs)
        return passed / count if spec.score == "share" else float(passed == count)

    return reward


def last_block(reply: str) -> str | None:
    """Return the content of the last complete code block of `reply`; None if it has none."""
    blocks = _BLOCK.findall(reply)
    return blocks[-1][1] if blocks else None


def _passed_asserts(code: str | None, tests: Sequence[str], spec: CodeReward, run: RunProgram) -> int:
    """Return how many statements of `tests` pass after `code`, in one process."""
    if code is None:
        return 0
    word = secrets.token_hex(16)
    job = {"code": code, "tests": list(tests), "all": spec.score == "all", "word": word}
    outcome = run(_ASSERT_RUNNER, json.dumps(job).encode(), spec.timeout_s)
    printed = set(outcome.output.decode(errors="replace").splitlines())
    return sum(f"{word} {number}" in printed for number in range(len(tests)))


def _passed_pairs(code: str | None, pairs: Sequence[tuple[str, str]], spec: CodeReward, run: RunProgram) -> int:
    """Return for how many of `pairs` the program `code` prints the second text if its input is the first one.

    With score="all", stop at the first failure. White space at the ends of lines does not count.
    """
    if code is None:
        return 0
    deadline, passed = time.monotonic() + spec.timeout_s, 0
    for given, expected in pairs:
        left = deadline - time.monotonic()
        if left <= 0:
            break
        outcome = run(code, given.encode(), left)
        printed = outcome.output.decode(errors="replace")
        if outcome.code == 0 and not outcome.ended and _lines(printed) == _lines(expected):
            passed += 1
        elif spec.score == "all":
            break
    return passed


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]


def _statements(value: Any, column: str) -> list[str]:
    """Return the tests in a column: a list of statements, or a text of them, which is one test."""
    tests = value if isinstance(value, list) else [value]
    if not tests or not all(isinstance(test, str) and test.strip() for test in tests):
        raise RowError(f"column {column!r} is {brief(value)}, neither a list of statements nor a text of them")
    return tests


def _pairs(value: Any, column: str) -> list[tuple[str, str]]:
    """Return the (input, output) pairs in a column: a list of {input, output}, or two lists {inputs, outputs}.

    The column may also be a text with this JSON, as in APPS and TACO.
    """
    try:
        pairs = untrusted.json_record(value) if isinstance(value, str) else value
        if isinstance(pairs, dict):
            pairs = [{"input": a, "output": b} for a, b in zip(pairs["inputs"], pairs["outputs"], strict=True)]
        texts = [(pair["input"], pair["output"]) for pair in pairs]
    except (ValueError, KeyError, TypeError, RecursionError):
        texts = []
    if not texts or not all(isinstance(text, str) for pair in texts for text in pair):
        raise RowError(f"column {column!r} is {brief(value)}, not a list of {{input, output}} with texts")
    return texts
