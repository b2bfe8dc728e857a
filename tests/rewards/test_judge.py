"""A judge by HTTP, and the requests to it."""

import itertools
import time

import pytest

from kumi.errors import ConfigError
from kumi.rewards.http_request import RequestError, RequestTimeoutError, bearer, post_json
from kumi.rewards.judge import judge
from kumi.rewards.reward_spec import JudgeReward


def spec(url, **keys):
    return JudgeReward(url=url, model="m", prompt="{topic}: rate {reply} for {prompt}", scale=10.0, **keys)


def answering(text):
    return lambda content: (200, {"choices": [{"message": {"content": text}}]})


def test_a_judge_gets_the_prompt_and_its_score_is_divided_by_the_scale(serving, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "secret-key\n")
    with serving(answering("First 3, on reflection: 7.5")) as (url, seen):
        reward = judge(spec(url, key_variable="JUDGE_KEY"))("2 + 2?", "{prompt} is 4", {"topic": "sums"})
    assert reward == 0.75
    content, headers = seen[0]
    # A name in a reply is text.
    assert content["messages"] == [{"role": "user", "content": "sums: rate {prompt} is 4 for 2 + 2?"}]
    assert (content["model"], content["temperature"]) == ("m", 0)
    assert headers["Authorization"] == "Bearer secret-key"


@pytest.mark.parametrize(
    ("text", "reason"), [("I cannot tell.", "wrote no score"), ("11", "outside of 0 to scale=10"), (None, "no choices")]
)
def test_a_judge_that_gives_no_score_is_an_error(serving, text, reason):
    with serving(answering(text)) as (url, _), pytest.raises(RequestError, match=reason):
        judge(spec(url))("p", "r", {"topic": "t"})


def test_a_key_that_is_not_set_or_no_key_is_refused_without_showing_it(monkeypatch):
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    with pytest.raises(ConfigError, match="JUDGE_KEY is not set"):
        judge(spec("http://127.0.0.1/v1", key_variable="JUDGE_KEY"))
    monkeypatch.setenv("JUDGE_KEY", "secret\r\nHost: other")
    with pytest.raises(ConfigError, match="is not a key") as error:
        bearer("JUDGE_KEY", "here")
    assert "secret" not in str(error.value)


def test_passing_failures_are_repeated_and_lasting_ones_are_not(serving):
    statuses, pauses = iter([503, 429, 200]), []
    with serving(lambda content: (next(statuses), {"n": content["n"]})) as (url, seen):
        assert post_json(url, {"n": 1}, {}, 30.0, 3, pauses.append) == {"n": 1}
    assert (len(seen), len(pauses)) == (3, 2)
    with (
        serving(lambda content: (401, b"no such key")) as (url, seen),
        pytest.raises(RequestError, match=r"401 .*no such"),
    ):
        post_json(url, {}, {}, 30.0, 3, pauses.append)
    assert len(seen) == 1
    with serving(lambda content: (500, b"")) as (url, seen), pytest.raises(RequestError, match="answered 500"):
        post_json(url, {}, {}, 30.0, 2, pauses.append)
    assert len(seen) == 2
    with pytest.raises(RequestError, match="cannot be reached"):
        post_json(url, {}, {}, 30.0, 1)


def test_no_redirect_is_followed(serving):
    with serving(lambda content: (200, {})) as (other, arrived):
        with (
            serving(lambda content: (302, b"", ("Location", other))) as (url, _),
            pytest.raises(RequestError, match="302"),
        ):
            post_json(url, {}, {"Authorization": "Bearer x"}, 30.0, 3)
        assert arrived == []


def test_an_answer_that_is_no_json_or_late_is_an_error(serving):
    with serving(lambda content: (200, b"<html>")) as (url, _), pytest.raises(RequestError, match="no valid JSON"):
        post_json(url, {}, {}, 30.0, 3)
    with serving(lambda content: time.sleep(0.4) or (200, {})) as (url, _), pytest.raises(RequestTimeoutError):
        post_json(url, {}, {}, 0.1, 3)
    attempts = itertools.count()
    with (
        serving(lambda content: (503, {"n": next(attempts)})) as (url, _),
        pytest.raises(RequestTimeoutError, match="503"),
    ):
        post_json(url, {}, {}, 0.2, 9)
