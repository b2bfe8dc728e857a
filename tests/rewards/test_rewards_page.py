"""The examples of docs/rewards.md."""

import re
import tomllib
from pathlib import Path

from kumi.config.reward_section import RewardSection
from kumi.rewards import REWARD_KINDS
from kumi.rewards.number_text import equal_numbers, last_number, whole_number

PAGE = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text()


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.M | re.S)


def test_its_tables_are_those_of_a_run_file():
    tables = [table for block in blocks("toml") for table in tomllib.loads(block)["rewards"]]
    assert {RewardSection.model_validate(table).build().kind for table in tables} >= {"function", "judge", "code"}
    assert re.findall(r"^\| `([\w-]+)` \|", PAGE, re.M)[: len(REWARD_KINDS)] == list(REWARD_KINDS)


def test_its_functions_run(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    for block in blocks("python"):
        exec(block, names)
    assert [names["helpful"]("p", "it is 4", row) for row in ({}, {"answer": "4"}, {"answer": "5"})] == [None, 1, 0]
    assert capsys.readouterr().out.startswith("1.0 {'boxed': 1.0, 'length': 0.0} {'boxed': RewardFaults(timeouts=0")


def test_its_table_of_numbers_is_right():
    rows = re.findall(r"^\| `([^`]*)` \| `([^`]*)`(?:, or `([^`]*)`)? \| (equal|different)", PAGE, re.M)
    assert len(rows) == 5
    for reply, answer, other, relation in rows:
        for text in filter(None, (answer, other)):
            left, right = whole_number(reply) or last_number(reply), whole_number(text)
            assert equal_numbers(left, right) is (relation == "equal")
