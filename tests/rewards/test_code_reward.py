"""The code of a reply and the tests of its row, in a sandbox that is a plain process here; and a sandbox service."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kumi.errors import ConfigError
from kumi.rewards import code_reward as module
from kumi.rewards.code_reward import check_sandbox, code_reward, last_block
from kumi.rewards.http_request import RequestError
from kumi.rewards.reward_spec import CodeReward
from kumi.rewards.sandbox.program_run import Outcome
from kumi.rewards.text_rewards import RowError

SQUARE = "Here:\n```python\ndef f(x):\n    return x * x\n```\nDone."
CUBE = SQUARE.replace("x * x", "x ** 3")
ADD = "```\na, b = map(int, input().split())\nprint(a + b)\n```"


def run_program(program, stdin, timeout_s):
    """Run a program of these tests."""
    done = subprocess.run([sys.executable, "-c", program], input=stdin, capture_output=True, timeout=60)
    return Outcome(done.returncode, done.stdout, done.stderr)


class Plain:
    run = staticmethod(run_program)


def scored(reply, column, **keys):
    return code_reward(CodeReward(**keys), Plain())("a prompt", reply, {"tests": column})


@pytest.mark.parametrize(
    ("reply", "code"),
    [
        ("```python\na\n```", "a\n"),
        ("```\na\n```\ntext\n~~~py\nb\n~~~", "b\n"),
        ("````\n```\na\n```\n````", "```\na\n```\n"),
        ("```python\na\n", None),
        ("a", None),
        ("x ```a``` y", None),
    ],
)
def test_the_last_block_of_a_reply(reply, code):
    assert last_block(reply) == code


def test_asserts_run_after_the_code():
    tests = ["assert f(2) == 4", "assert f(3) == 9", "y = 1\nassert f(-1) == y"]
    assert scored(SQUARE, tests) == 1
    assert scored(SQUARE, "\n".join(tests)) == 1
    assert scored(CUBE, tests) == 0
    assert scored(CUBE, ["assert f(1) == 1", *tests], score="share") == 0.25
    assert scored("no code", tests) == 0


@pytest.mark.parametrize(
    "code", ["def f(x", "raise SystemExit(0)", "import os; os._exit(0)", "1 / 0", "print('[0]')", "def f(x): exit(0)"]
)
def test_code_that_ends_early_passes_no_test(code):
    assert scored(f"```python\n{code}\n```", ["assert f(1) == 1"], score="share") == 0


def test_tests_before_the_one_that_ends_the_program_count_as_a_share():
    tests = ["assert f(2) == 4", "import os; os._exit(0)", "assert f(3) == 9"]
    assert scored(SQUARE, tests, score="share") == 1 / 3
    assert scored(SQUARE, tests) == 0


def test_a_main_program_is_not_run_before_asserts():
    reply = "```python\ndef f(x):\n    return x\nif __name__ == '__main__':\n    input()\n```"
    assert scored(reply, ["assert f(1) == 1"]) == 1


@pytest.mark.parametrize(
    "pairs",
    [
        [{"input": "1 2\n", "output": "3"}, {"input": "4 5", "output": "9 \n\n"}],
        {"inputs": ["1 2", "4 5"], "outputs": ["3\n", "9"]},
        '{"inputs": ["1 2", "4 5"], "outputs": ["3", "9"]}',
    ],
)
def test_a_program_prints_the_output_for_each_input(pairs):
    assert scored(ADD, pairs, tests="stdin") == 1
    assert scored(ADD.replace("a + b", "a * b + 1"), pairs, tests="stdin", score="share") == 0.5
    assert scored(ADD + "\n```\nprint(3)\nraise SystemExit(1)\n```", pairs, tests="stdin", score="share") == 0


def test_tests_that_have_not_run_in_time_fail(monkeypatch):
    times = iter([0.0, 1.0, 5.0, 11.0])
    monkeypatch.setattr(module.time, "monotonic", lambda: next(times))
    pairs = [{"input": f"{number} 1", "output": str(number + 1)} for number in range(4)]
    assert scored(ADD, pairs, tests="stdin", score="share", timeout_s=10.0) == 0.5


@pytest.mark.parametrize(
    ("keys", "column"),
    [
        ({}, []),
        ({}, [1]),
        ({}, {"a": 1}),
        ({"tests": "stdin"}, []),
        ({"tests": "stdin"}, "not JSON"),
        ({"tests": "stdin"}, [{"input": "1"}]),
        ({"tests": "stdin"}, {"inputs": ["1"], "outputs": []}),
        ({"tests": "stdin"}, [{"input": "1", "output": 1}]),
    ],
)
def test_a_column_without_tests_is_an_error_of_the_row(keys, column):
    with pytest.raises(RowError, match="column 'tests' is"):
        scored(SQUARE, column, **keys)


def service(content):
    """A service of the user's own."""
    done = run_program(content["program"], content["stdin"].encode(), content["timeout_s"])
    return 200, {"exit_code": done.code, "stdout": done.output.decode(), "timed_out": False}


def test_a_service_runs_the_programs(serving, monkeypatch):
    monkeypatch.setenv("SANDBOX_KEY", "secret")
    with serving(service) as (url, seen):
        spec = CodeReward(service=url, key_variable="SANDBOX_KEY", memory_mb=100, files_mb=2, output_kb=3, processes=4)
        assert check_sandbox(spec, "x", 1) is None
        assert code_reward(spec, None)("p", SQUARE, {"tests": ["assert f(2) == 4"]}) == 1
        content, headers = seen[-1]
    assert headers["Authorization"] == "Bearer secret"
    sizes = {key: content[key] for key in ("memory_mb", "processes", "files_mb", "output_kb", "timeout_s")}
    assert sizes == {"memory_mb": 100, "processes": 4, "files_mb": 2, "output_kb": 3, "timeout_s": 10.0}


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (lambda content: (200, {"exit_code": 1, "stdout": "", "timed_out": False}), r"printed b'' .*\(exit code 1\)"),
        (lambda content: (200, {"ok": True}), "without exit_code, stdout and timed_out"),
        (lambda content: (403, b"no"), "answered 403"),
    ],
)
def test_a_service_that_runs_no_programs_is_refused(serving, answer, reason):
    with serving(answer) as (url, _), pytest.raises(ConfigError, match=reason):
        check_sandbox(CodeReward(service=url), "x", 1)


def test_a_service_that_fails_later_is_no_fault_of_the_reply(serving):
    with serving(lambda content: (403, b"no")) as (url, _), pytest.raises(RequestError):
        code_reward(CodeReward(service=url), None)("p", SQUARE, {"tests": ["assert f(2) == 4"]})
