"""Rewards of the replies of a step: weights, faults, workers that hang or die."""

import os
import time
from pathlib import Path

import pytest

from kumi.errors import ConfigError, KumiError
from kumi.rewards import RewardRequest, RewardScorer, spec_from
from session_processes import runs_with

FUNCTIONS = """
import os, subprocess, time
from beside import BONUS

def length(prompt, reply, row):
    print("noise")
    subprocess.run(["echo", "more noise"])
    return len(reply) + BONUS

async def later(prompt, reply, row):
    return row["n"] if reply != "none" else None

def fragile(prompt, reply, row):
    if reply == "hang":
        subprocess.Popen(["sleep", "300.7305519"])
        time.sleep(300)
    if reply == "die":
        os._exit(3)
    if reply == "exit":
        raise SystemExit(0)
    if reply == "nan":
        return float("nan")
    if reply == "text":
        return "1"
    if reply == "raise":
        raise ValueError("of the user")
    return True

def broken(prompt, reply, row):
    raise ValueError("of the user")

def two(prompt, reply):
    return 1
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    (tmp_path / "beside.py").write_text("BONUS = 0.5\n")
    return tmp_path


def function(name, **keys):
    return spec_from({"kind": "function", "file": f"mine.py:{name}", "name": name, **keys})


def request(reply, tokens=1, truncated=False, **row):
    return RewardRequest("the prompt", reply, row, tokens, truncated)


def test_the_sum_of_a_reply_is_weighted_over_the_rewards_that_apply(folder):
    rewards = [
        function("length", weight=0.5),
        function("later"),
        spec_from({"kind": "exact", "weight": 2.0}),
        spec_from({"kind": "length", "name": "short"}),
    ]
    with RewardScorer(rewards, folder, 2, 100) as scorer:
        results = scorer.score(
            [
                request("four", n=0.25, answer="four"),
                request("none", n=1, answer="four"),
                request("four", n=1, answer=None),
                request("long", 90, n=1, answer="four"),
                request("cut", 5, True, n=1, answer="four"),
            ]
        )
        assert [dict(result.parts) for result in results] == [
            {"length": 4.5, "later": 0.25, "exact": 1.0, "short": 0.0},
            {"length": 4.5, "later": None, "exact": 0.0, "short": 0.0},
            {"length": 4.5, "later": 1.0, "exact": None, "short": 0.0},
            {"length": 4.5, "later": 1.0, "exact": 0.0, "short": -0.5},
            {"length": 3.5, "later": 1.0, "exact": 0.0, "short": -1.0},
        ]
        assert [result.total for result in results] == [4.5, 2.25, 3.25, 2.75, 1.75]
        assert scorer.faults["exact"].missing == 1


def test_a_reward_that_fails_leaves_a_reply_without_a_sum(folder):
    replies = ["fine", "hang", "die", "exit", "nan", "text", "raise"]
    with RewardScorer([function("fragile", timeout_s=2.0), spec_from({"kind": "length"})], folder, 2, 100) as scorer:
        results = scorer.score([request(reply) for reply in replies])
        assert [result.parts["fragile"] for result in results] == [1.0] + [None] * 6
        assert [result.total for result in results] == [1.0] + [None] * 6
        faults = scorer.faults["fragile"]
        assert (faults.timeouts, faults.exceptions, faults.missing) == (1, 5, 0)
        assert faults.timeout_example == "it took too long; prompt 'the prompt', reply 'hang'"
        assert "the worker process exited with code 3; prompt 'the prompt', reply 'die'" in faults.exception_example
        # The children of a worker end with it, and the workers that were replaced go on.
        assert not runs_with("300.7305519")
        assert [result.total for result in scorer.score([request("fine")] * 5)] == [1.0] * 5
        workers = [worker.process.pid for worker in scorer._workers._workers]
    assert [pid for pid in workers if Path(f"/proc/{pid}").exists()] == []


def test_an_example_names_the_place_in_the_user_s_file(folder):
    with RewardScorer([function("fragile")], folder, 1, 100) as scorer:
        scorer.score([request("fine"), request("raise")])
        line = 1 + FUNCTIONS.splitlines().index('        raise ValueError("of the user")')
        assert scorer.faults["fragile"].exception_example.startswith(f"ValueError: of the user (mine.py:{line}); ")


def test_a_reward_of_weight_0_is_reported_only(folder):
    rewards = [function("length"), function("fragile", weight=0.0)]
    with RewardScorer(rewards, folder, 1, 100) as scorer:
        results = scorer.score([request("raise"), request("four")])
    assert [(result.total, result.parts["fragile"]) for result in results] == [(5.5, None), (4.5, 1.0)]


def test_a_reward_that_fails_for_all_replies_of_a_step_stops_the_run(folder):
    rewards = [function("broken"), function("length")]
    with RewardScorer(rewards, folder, 2, 100) as scorer:
        with pytest.raises(KumiError, match=r"'broken' failed for all 3 .*ValueError: of the user \(mine\.py:\d+\)"):
            scorer.score([request("four")] * 3)
        assert scorer.faults["broken"].exceptions == 3


def test_a_step_whose_rows_lack_the_columns_stops_the_run(tmp_path):
    exact = spec_from({"kind": "exact", "column": "solution"})
    with RewardScorer([exact], tmp_path, 1, 100) as scorer:
        with pytest.raises(KumiError, match="column 'solution' is absent; the row has answer"):
            scorer.score([request("4", answer="4")] * 2)
        # Rows of several sources may have different columns.
        results = scorer.score([request("4", answer="4"), request("4", solution="4"), request("4", solution=None)])
        assert [result.total for result in results] == [None, 1.0, None]
        assert scorer.faults["exact"].missing == 4


def test_a_search_without_end_is_ended(tmp_path):
    """A regular expression holds the interpreter's lock and handles no signal."""
    rewards = [spec_from({"kind": "regex", "pattern": "^(a+)+$", "timeout_s": 1.0}), spec_from({"kind": "length"})]
    with RewardScorer(rewards, tmp_path, 1, 100) as scorer:
        results = scorer.score([request("a" * 40 + "b"), request("aaa")])
        assert [result.parts["regex"] for result in results] == [None, 1.0]
        assert scorer.faults["regex"].timeouts == 1


@pytest.mark.parametrize(
    ("file", "reason"),
    [
        ("none.py:length", r"none\.py.* is not a file"),
        ("mine.py:absent", "has no function 'absent'"),
        ("mine.py:BONUS", "has no function 'BONUS'"),
        ("mine.py:two", r"cannot be called as two\(prompt, reply, row\)"),
        ("wrong.py:length", r"cannot be imported \(ZeroDivisionError"),
    ],
)
def test_a_function_that_cannot_be_used_is_refused_at_the_start(folder, file, reason):
    (folder / "wrong.py").write_text("1 / 0\n")
    with (
        pytest.raises(ConfigError, match=reason),
        RewardScorer([spec_from({"kind": "function", "file": file})], folder, 2, 100),
    ):
        pass


def test_a_reward_model_is_scored_by_the_caller(tmp_path):
    model = spec_from({"kind": "model", "source": "runs/rm/hf"})
    with pytest.raises(ConfigError, match="there is no reward model in memory"):
        RewardScorer([model], tmp_path, 1, 100)
    asked = []

    def score_model(spec, requests):
        asked.append((spec.source, [request.reply for request in requests]))
        return [1.5, None, float("inf")]

    with RewardScorer([model], tmp_path, 1, 100, score_model) as scorer:
        results = scorer.score([request("a"), request("b"), request("c")])
        assert asked == [("runs/rm/hf", ["a", "b", "c"])]
        assert [result.total for result in results] == [1.5, None, None]
        assert scorer.faults["model"].exceptions == 1


def test_judges_are_asked_at_the_same_time(serving, tmp_path):
    judge = {"kind": "judge", "model": "m", "prompt": "{reply} {answer}", "scale": 2.0, "concurrency": 8}

    def answer(content):
        text = content["messages"][0]["content"]
        time.sleep(0.2)
        return 200, {"choices": [{"message": {"content": text.split()[1]}}]}

    with serving(answer) as (url, _), RewardScorer([spec_from({**judge, "url": url})], tmp_path, 1, 100) as scorer:
        replies = [request("r", answer=str(number % 4)) for number in range(8)] + [request("r")]
        results = scorer.score(replies)
        faults = scorer.faults["judge"]
    assert [result.total for result in results] == [0, 0.5, 1, None, 0, 0.5, 1, None, None]
    assert (faults.exceptions, faults.missing) == (2, 1)
    assert "outside of 0 to scale=2" in faults.exception_example


def test_no_reply_needs_no_worker(tmp_path):
    with RewardScorer([spec_from({"kind": "length"})], tmp_path, 2, 100) as scorer:
        assert scorer.score([]) == []
        assert scorer._workers is None
        assert scorer.score([request("", 100)])[0].total == -1


def test_workers_end_when_their_parent_does(folder):
    """Their input ends, also where the parent was killed."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        scorer = RewardScorer([function("length")], folder, 2, 100).__enter__()
        os.write(write, " ".join(str(worker.process.pid) for worker in scorer._workers._workers).encode())
        os.kill(os.getpid(), 9)
    os.close(write)
    workers = [int(word) for word in os.read(read, 1000).split()]
    os.close(read)
    os.waitpid(child, 0)
    assert len(workers) == 2
    deadline = time.monotonic() + 60
    while any(_alive(pid) for pid in workers):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_reward_that_fails_where_it_is_rare_does_not_stop_the_run(folder):
    """Of one of several sources, a step may have a single row."""
    rewards = [function("length"), spec_from({"kind": "number"})]
    with RewardScorer(rewards, folder, 1, 100) as scorer:
        results = scorer.score([request("four", answer="no number"), *[request("four")] * 2])
        assert [result.total for result in results] == [None, 4.5, 4.5]
        with pytest.raises(KumiError, match="'number' failed for all 1 replies of a step, and so far by 2 exceptions"):
            scorer.score([request("four", answer="no number"), request("four")])
