"""The rewards of texts: answers, numbers, boxes, regular expressions, schemas, lengths."""

import json
import sys
import types
from dataclasses import fields

import pytest

from kumi.errors import ConfigError
from kumi.rewards.length_reward import length_bounds, length_reward
from kumi.rewards.reward_spec import REWARD_KINDS, check_rewards, spec_from
from kumi.rewards.reward_worker import build
from kumi.rewards.text_rewards import RowError


def scored(reply, row=None, folder=None, **keys):
    return build(spec_from(keys), folder, None)("a prompt", reply, row or {})


@pytest.mark.parametrize(
    ("keys", "reply", "answer", "reward"),
    [
        ({"kind": "exact"}, " Paris\n", "Paris", 1),
        ({"kind": "exact"}, "paris", "Paris", 0),
        ({"kind": "exact"}, "B", ["A", "B"], 1),
        ({"kind": "exact"}, "4", 4, 1),
        ({"kind": "exact", "after": "</think>"}, "Lyon? </think> no </think> Paris", "Paris", 1),
        ({"kind": "exact", "after": "</think>"}, "Paris", "Paris", 0),
        ({"kind": "number"}, "It is 1,203 in all.", "7 + 1196 = 1203\n#### 1203", 1),
        ({"kind": "number"}, "It is 12 or 13.", "12", 0),
        ({"kind": "number"}, "none", "12", 0),
        ({"kind": "number", "tolerance": 0.01}, "3.14", "3.14159", 1),
        ({"kind": "number", "after": "Answer:"}, "5 Answer: six", "5", 0),
        ({"kind": "boxed"}, r"so $\boxed{\dfrac{1}{2}}$", "0.5", 1),
        ({"kind": "boxed"}, r"\boxed{1}, no: \boxed{x + 1}", r"The answer is $\boxed{x+1}$.", 1),
        ({"kind": "boxed"}, "0.5", "0.5", 0),
        ({"kind": "regex", "pattern": r"^<a>.*</a>$"}, "<a>x</a>", None, 1),
        ({"kind": "regex", "pattern": r"^<a>.*</a>$"}, "x</a>", None, 0),
        ({"kind": "regex", "pattern": r"answer: (\w)", "column": "answer"}, "answer: A, no, answer: B", "B", 1),
        ({"kind": "regex", "pattern": r"answer: (\w)", "column": "answer"}, "answer: B, no, answer: A", "B", 0),
    ],
)
def test_a_reply_is_compared_with_its_row(keys, reply, answer, reward):
    assert scored(reply, {"answer": answer}, **keys) == reward


@pytest.mark.parametrize(
    ("keys", "answer", "reason"),
    [
        ({"kind": "exact"}, {"a": 1}, "neither a text nor a list of texts"),
        ({"kind": "exact"}, True, "neither a text nor a list of texts"),
        ({"kind": "number"}, "about twelve", "has no number"),
    ],
)
def test_a_column_that_cannot_be_read_is_an_error_of_the_row(keys, answer, reason):
    with pytest.raises(RowError, match=reason):
        scored("12", {"answer": answer}, **keys)


SCHEMA = {"type": "object", "required": ["city"], "properties": {"city": {"type": "string"}}}


@pytest.mark.parametrize(
    ("reply", "reward"),
    [
        ('{"city": "Paris"}', 1),
        ('```json\n{"city": "Paris"}\n```', 1),
        ('{"city": 1}', 0),
        ('{"city": "Paris"} and more', 0),
        ('{"city": "Paris", "city": "Lyon"}', 0),
        ("", 0),
    ],
)
def test_a_reply_is_valid_under_a_schema(tmp_path, reply, reward):
    (tmp_path / "city.json").write_text(json.dumps(SCHEMA))
    assert scored(reply, folder=tmp_path, kind="json-schema", schema_file="city.json") == reward
    assert scored(reply, {"s": SCHEMA}, kind="json-schema", column="s") == reward
    assert scored(reply, {"s": json.dumps(SCHEMA)}, kind="json-schema", column="s") == reward


def test_a_file_without_a_schema_is_refused(tmp_path):
    (tmp_path / "a.json").write_text('{"typ": "object"}')
    with pytest.raises(ConfigError, match=r"a\.json is not a JSON schema \(the keyword 'typ'"):
        scored("{}", folder=tmp_path, kind="json-schema", schema_file="a.json")
    with pytest.raises(ConfigError, match=r"b\.json.* does not exist"):
        scored("{}", folder=tmp_path, kind="json-schema", schema_file="b.json")
    with pytest.raises(RowError, match="column 's' is not a JSON schema"):
        scored("{}", {"s": 1}, kind="json-schema", column="s")
    with pytest.raises(RowError, match="column 's' is not a JSON schema"):
        scored("{}", {"s": "{"}, kind="json-schema", column="s")


def test_the_length_reward_is_dapo_s():
    """DAPO's own sizes: 20,480 tokens, the last 4,096 of them punished (arXiv:2503.14476, equation 13)."""
    bounds = length_bounds(spec_from({"kind": "length"}), 20_480)
    assert bounds == (16_384, 20_480)
    tokens = (0, 16_384, 17_408, 20_479, 20_480, 30_000)
    assert [length_reward(count, bounds) for count in tokens] == [0, 0, -0.25, (16_384 - 20_479) / 4096, -1, -1]
    assert length_bounds(spec_from({"kind": "length", "max_tokens": 100, "soft_tokens": 1}), 200) == (99, 100)


def test_math_verify_is_asked_for_what_kumi_s_own_comparison_leaves_unequal(monkeypatch):
    asked = []
    package = types.ModuleType("math_verify")
    package.parse = lambda text, parsing_timeout: text
    package.verify = lambda gold, target, timeout_seconds: asked.append((gold, target)) or gold == "$x(x+1)$"
    monkeypatch.setitem(sys.modules, "math_verify", package)
    keys = {"kind": "boxed", "compare": "math-verify"}
    assert scored(r"\boxed{0.5}", {"answer": "1/2"}, **keys) == 1
    assert asked == []
    assert scored(r"\boxed{x^2+x}", {"answer": "x(x+1)"}, **keys) == 1
    assert scored(r"\boxed{x^2+x}", {"answer": "x"}, **keys) == 0
    assert asked == [("$x(x+1)$", "$x^2+x$"), ("$x$", "$x^2+x$")]


def test_math_verify_is_named_where_it_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ConfigError, match=r"pip install 'kumi\[math\]'"):
        scored("", kind="boxed", compare="math-verify")


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"kind": "exact", "name": "a b"}, "name='a b' is not a name"),
        ({"kind": "exact", "timeout_s": 0.0}, "timeout_s=0.0 is not a time"),
        ({"kind": "function", "file": "a.py"}, "write file = 'rewards.py:function'"),
        ({"kind": "function"}, "does not name a function"),
        ({"kind": "number", "tolerance": 1.0}, "tolerance=1.0"),
        ({"kind": "boxed", "compare": "sympy"}, "compare='sympy' is unknown"),
        ({"kind": "regex"}, "is empty"),
        ({"kind": "regex", "pattern": "("}, "is not a regular expression"),
        ({"kind": "regex", "pattern": "a", "column": "answer"}, "has no group"),
        ({"kind": "json-schema"}, "give one of them"),
        ({"kind": "length", "soft_tokens": 0}, "soft_tokens=0"),
        ({"kind": "model"}, "name the folder of a reward model"),
        ({"kind": "judge", "url": "file:///etc/passwd"}, "is not a URL of http"),
        ({"kind": "judge", "url": "https://me:secret@host/v1"}, "without a user and a password"),
        ({"kind": "judge", "url": "http://host/v1", "model": "m", "prompt": "Rate it."}, "has no {reply}"),
        ({"kind": "judge", "url": "http://host/v1", "model": "m", "prompt": "{reply}", "pattern": "x"}, "no group"),
        ({"kind": "code", "tests": "unit"}, "tests='unit' is unknown"),
        ({"kind": "code", "memory_mb": 1}, "memory_mb=1 is out of range"),
        ({"kind": "code", "key_variable": "sk-secret"}, "key_variable is not the name"),
    ],
)
def test_keys_that_cannot_be_used_are_refused(keys, reason):
    with pytest.raises(ConfigError) as error:
        spec_from(keys)
    assert reason in str(error.value)
    assert "sk-secret" not in str(error.value)


def test_rewards_have_different_names_and_a_weight():
    exact, zero = spec_from({"kind": "exact"}), spec_from({"kind": "exact", "weight": 0.0})
    with pytest.raises(ConfigError, match="add a table"):
        check_rewards([])
    with pytest.raises(ConfigError, match="two rewards have the name 'exact'"):
        check_rewards([exact, exact])
    with pytest.raises(ConfigError, match="every reward has weight=0"):
        check_rewards([zero])
    check_rewards([exact, spec_from({"kind": "number", "weight": 0.0})])


def test_every_key_has_a_description():
    for kind, spec in REWARD_KINDS.items():
        assert [field for field in fields(spec) if not field.metadata.get("text")] == [], kind
