"""`kumi data show`: which tokens are trained, as plain data, in the terminal, and beside the template's own text."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from kumi.cli import main
from kumi.data.unit_summary import length_histogram
from kumi.safe_output import visible

ROOT = Path(__file__).parents[2]
RUN_FILE = """
name = "chat"
[model]
source = "{root}/examples/chat"
init = "random"
[batch]
seq_len = 512
tokens_per_step = 1024
[data]
tokenizer = "{root}/examples/chat"
sources = [{{ path = "{data}" }}]
validation = 0
workers = 1
[train]
steps = 2
out = "{out}"
"""
ESCAPE = "a \x1b[31mred\x07 \u202e word"


@pytest.fixture(scope="module")
def run_file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("show")
    two_turns = [
        {"role": "user", "content": ESCAPE},
        {"role": "assistant", "reasoning_content": "hidden later", "content": "first"},
        {"role": "user", "content": "and <|im_end|>?"},
        {"role": "assistant", "content": "second", "weight": 0.5},
    ]
    (folder / "chats.jsonl").write_text(json.dumps({"messages": two_turns, "id": 7}) + "\n")
    path = folder / "run.toml"
    path.write_text(RUN_FILE.format(root=ROOT, data=folder / "chats.jsonl", out=folder / "out"))
    return str(path)


def shown(capsys, *words):
    assert main(["data", "show", *words]) == 0
    return capsys.readouterr().out


def test_the_trained_tokens_are_in_brackets_with_their_stop_token(run_file, capsys):
    text = shown(capsys, run_file)
    assert "[[<think>\n" in text
    assert "first<|im_end|>]]" in text
    assert "[[second<|im_end|> (weight 0.5)]]" in text.replace("second (weight 0.5)<|im_end|>", "second<|im_end|>")
    # The template leaves out the thoughts of earlier turns, so the second reply is a sample of its own.
    assert text.count("unit ") == 2


def test_control_characters_of_the_data_are_escaped(run_file, capsys):
    text = shown(capsys, run_file)
    assert "a \\x1b[31mred\\x07 \\u202e word" in text
    assert "\x1b" not in text
    assert visible("line\nbreak\r") == "line\nbreak\\r"


def test_json_has_the_same_text_and_the_counts(run_file, capsys):
    units = json.loads(shown(capsys, run_file, "--json"))["units"]
    runs = [
        run for unit in units for item in unit["sequences"] for message in item["messages"] for run in message["runs"]
    ]
    stops = [run["text"] for run in runs if run.get("stop")]
    assert stops == ["<|im_end|>", "<|im_end|>"]
    assert [run["weight"] for run in runs if "weight" in run] == [0.5, 0.5]
    for unit in units:
        (sequence,) = unit["sequences"]
        assert sum(run["tokens"] for message in sequence["messages"] for run in message["runs"]) == sequence["tokens"]
        assert [message["role"] for message in sequence["messages"]][:3] == ["", "user", "assistant"]
    # A control token that the user spells is text, not one more end of a message.
    user = "".join(run["text"] for run in units[1]["sequences"][0]["messages"][3]["runs"] if not run["control"])
    assert "<|im_end|>?" in user


def test_diff_shows_what_whole_conversations_leave_out(run_file, capsys):
    text = shown(capsys, run_file, "--diff")
    assert "+<think>" in text
    assert "the same text as the template's over the whole conversation" in text


def test_inspect_counts_lengths_shares_and_samples(run_file, capsys):
    shown(capsys, run_file)  # prepares
    assert main(["data", "inspect", run_file, "--json"]) == 0
    (source,) = json.loads(capsys.readouterr().out)["sources"]
    numbers = source["examples"]
    units = json.loads(shown(capsys, run_file, "--json"))["units"]
    tokens = [unit["sequences"][0]["tokens"] for unit in units]
    assert numbers["samples_a_row"] == 2
    assert numbers["trained_share"] == sum(unit["sequences"][0]["trained"] for unit in units) / sum(tokens)
    assert [sum(low["from"] <= length <= low["to"] for length in tokens) for low in numbers["lengths"]] == [
        entry["count"] for entry in numbers["lengths"]
    ]
    assert sum(entry["count"] for entry in numbers["trained_lengths"]) == 2
    assert numbers["packed"]["rows"] == 1
    assert 0 < numbers["packed"]["filled"] < 1
    assert (source["used"], source["ignored"]) == (["messages"], ["id"])
    assert main(["data", "inspect", run_file]) == 0
    text = capsys.readouterr().out
    assert "2.00 examples a row" in text
    assert "ignored: id" in text
    assert "tokens an example" in text


def test_lengths_are_counted_between_powers_of_two():
    counted = length_histogram(np.array([0, 1, 2, 3, 4, 7, 8]))
    assert [(entry["from"], entry["to"], entry["count"]) for entry in counted] == [
        (0, 0, 1),
        (1, 1, 1),
        (2, 3, 2),
        (4, 7, 2),
        (8, 15, 1),
    ]
    assert length_histogram(np.zeros(0, np.int64)) == []


def test_a_number_is_refused_where_it_has_no_meaning(run_file, capsys):
    assert main(["data", "inspect", run_file, "3"]) == 2
    assert "only `show` takes a number" in capsys.readouterr().err
    assert main(["data", "show", run_file, "--source", "nowhere"]) == 2
    assert "no source has the name 'nowhere'" in capsys.readouterr().err
