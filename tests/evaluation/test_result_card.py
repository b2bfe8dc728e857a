"""`kumi eval --write-card`: results in the model card, as a table and as the hub's model index."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import huggingface_hub
import pytest
import yaml
from markdown_it import MarkdownIt

from kumi.cli import main
from kumi.convert import convert
from kumi.convert.hf.card import check_verified, model_card
from kumi.convert.hf.card_text import header_of, title_of, with_header_key
from kumi.convert.hf.origin import card_header
from kumi.errors import ConfigError, RefusedError
from kumi.evaluation.result_card import exported_folder, write_results
from kumi.evaluation.task_result import Metric, TaskResult
from kumi.safe_output import inline_markdown
from kumi.spec import families

CARD = """---
# written by hand
license: mit   # of the base model
base_model:
- org/base

# the end
tags: [a, "b"]
---

# A model

Text that stays, with a table:

| a | b |
|---|---|
| 1 | 2 |
"""


@pytest.fixture
def folder(model_folder, tmp_path) -> Path:
    """A folder that kumi exported and verified."""
    convert(model_folder, tmp_path / "exported", to="hf", verify=True)
    return tmp_path / "exported"


def _result(name="quiz", value=0.5, stderr: float | None = 0.1, **others):
    metrics = {"acc": Metric(value, stderr), **others}
    return TaskResult(name, "multiple_choice", 12, metrics)


def _figure(value):
    return f"{value:.4f}" if value < 1e4 else f"{value:.4g}"


def _hub_results(folder):
    """The results that the hub's own client reads from the card, by data set and metric."""
    card = huggingface_hub.ModelCard.load(folder / "README.md")
    return {(each.dataset_name, each.metric_type): each.metric_value for each in card.data.eval_results}


def test_the_hub_reads_the_results_of_an_evaluation(folder, task_folder, capsys):
    before = (folder / "README.md").read_text()
    words = [
        "eval",
        str(folder),
        "--data",
        str(task_folder / "texts.jsonl"),
        "--tasks",
        str(task_folder / "tasks.toml"),
    ]
    assert main([*words, "--json"]) == 0
    (result,) = json.loads(capsys.readouterr().out)["models"]
    assert (folder / "README.md").read_text() == before  # never without the flag
    assert main([*words, "--write-card"]) == 0
    assert f"card       {folder}/README.md" in capsys.readouterr().out
    text = (folder / "README.md").read_text()
    read, metrics = _hub_results(folder), [(name, task["metrics"]) for name, task in result["tasks"].items()]
    expected = {(name, key): each["value"] for name, values in metrics for key, each in values.items()}
    assert read.keys() == expected.keys()
    assert all(read[key] == pytest.approx(value, rel=1e-5) for key, value in expected.items())
    for name, values in metrics:
        for key, each in values.items():
            assert re.search(
                rf"^\| {re.escape(name)} \| {key} \| (higher|lower) \| \d+ \| "
                rf"{re.escape(_figure(each['value']))} \| [\d.e+]+ \| float32, 32 tokens \|$",
                text,
                re.M,
            )
    header = card_header(folder)
    assert header.pop("model-index")[0]["name"] == "exported"
    assert header == yaml.safe_load(before.split("---\n")[1])
    check_verified(folder)  # the card is not among the verified files
    assert str(folder.parent) not in text
    assert str(task_folder) not in text
    # Again, with one of the tasks: nothing is doubled, nothing is lost.
    assert main([*words[:4], "--write-card"]) == 0
    assert _hub_results(folder) == read
    assert sorted((folder / "README.md").read_text().splitlines()) == sorted(text.splitlines())


def test_everything_else_in_a_card_stays(tmp_path):
    (tmp_path / "README.md").write_text(CARD)
    write_results(tmp_path, [_result()], "float32", "")
    text = (tmp_path / "README.md").read_text()
    head, index, rest = text.partition("model-index:\n")
    assert head == CARD.partition("---\n\n")[0]
    assert CARD.partition("---\n\n")[2] in rest
    assert yaml.safe_load(index + rest.partition("---\n")[0])["model-index"][0]["name"] == "A model"
    # An old index is replaced where it is.
    moved = CARD.replace("tags:", "model-index:\n- name: mine\n  results: []\ntags:")
    (tmp_path / "README.md").write_text(moved)
    write_results(tmp_path, [_result()], "float32", "")
    text = (tmp_path / "README.md").read_text()
    assert '    name: acc\ntags: [a, "b"]\n---\n' in text
    assert "\n# the end\nmodel-index:\n- name: mine\n  results:\n" in text
    assert _hub_results(tmp_path) == {("quiz", "acc"): 0.5}


def test_results_of_others_stay_and_the_same_task_is_replaced(tmp_path):
    index = [
        {
            "name": "theirs",
            "results": [
                {
                    "task": {"type": "text-generation"},
                    "dataset": {"type": "org/x", "name": "X"},
                    "metrics": [{"type": "f1", "value": 0.25}],
                }
            ],
        }
    ]
    (tmp_path / "README.md").write_text(with_header_key(CARD, "model-index", index))
    write_results(tmp_path, [_result("quiz", 0.5), _result("sums", 0.75)], "float32", "")
    write_results(tmp_path, [_result("quiz", 0.625, None)], "bfloat16", "")
    assert _hub_results(tmp_path) == {("X", "f1"): 0.25, ("quiz", "acc"): 0.625, ("sums", "acc"): 0.75}
    rows = [line for line in (tmp_path / "README.md").read_text().splitlines() if " acc " in line]
    assert rows == [
        "| sums | acc | higher | 12 | 0.7500 | 0.1000 | float32 |",
        "| quiz | acc | higher | 12 | 0.6250 |  | bfloat16 |",
    ]
    assert card_header(tmp_path)["model-index"][0]["name"] == "theirs"


NAMES = [
    "a|b",
    "<script>alert(1)</script>",
    "<!-- results of kumi eval -->",
    "<!-- end of results of kumi eval -->",
    "[x](http://y)![z](w)",
    "*a* _b_ `c` $d$ ~e~ # f \\ g &amp;",
    "two\nlines\r\n---\nkey: value",
    "no",
    "1e3",
    "'\" : - # {a: b}",
    "\x1b[31m\u202eevil\x00",
    "\ud83d broken".encode("utf-8", "replace").decode(),
    "\U0001f600 \u4e2d\u6587",
]


@pytest.mark.parametrize("name", NAMES)
def test_names_are_shown_as_they_are(name, tmp_path):
    """The hub's client reads the same name, and Markdown has one row with one cell for it."""
    (tmp_path / "README.md").write_text(CARD)
    for _ in range(2):
        write_results(tmp_path, [_result(name), _result("other")], "float32", "")
        assert _hub_results(tmp_path) == {(name, "acc"): 0.5, ("other", "acc"): 0.5}
        text = (tmp_path / "README.md").read_text()
        rows = [line for line in text.splitlines() if "| acc |" in line]
        assert len(rows) == 2
        assert all(len(re.split(r"(?<!\\)\|", row)) == 9 for row in rows)
        assert len(re.findall(r"^<!--", text, re.M)) == 2
        assert header_of(text).keys() == {"license", "base_model", "tags", "model-index"}


@pytest.mark.parametrize("name", NAMES)
def test_markdown_shows_names_of_models_as_they_are(name):
    """A parser of Markdown finds one heading, and no other element."""
    shown = inline_markdown(name)
    assert "\n" not in shown
    assert "<" not in shown
    spec = families.from_hf(
        {
            "model_type": "llama",
            "vocab_size": 32,
            "hidden_size": 8,
            "intermediate_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
        }
    )
    card = model_card(name=name, model=spec, facts={"trained on": name})
    assert f"\n# {shown}\n" in card
    assert f"| trained on | {shown} |" in card
    if name.isprintable() and "&" not in name:
        assert title_of(card) == " ".join(name.split())
    html = MarkdownIt("commonmark").render(f"# {shown}")
    assert re.fullmatch(r"<h1>[^<]*</h1>\n", html), html


def test_values_that_are_not_finite_are_in_the_table_only(tmp_path):
    (tmp_path / "README.md").write_text(CARD)
    write_results(tmp_path, [_result(perplexity=Metric(float("inf"), float("nan")))], "float32", "")
    assert _hub_results(tmp_path) == {("quiz", "acc"): 0.5}
    assert "| quiz | perplexity | lower | 12 | inf | nan | float32 |" in (tmp_path / "README.md").read_text()


def test_a_folder_without_a_card_gets_one(tmp_path):
    write_results(tmp_path, [_result()], "float32", "")
    assert _hub_results(tmp_path) == {("quiz", "acc"): 0.5}
    assert card_header(tmp_path)["model-index"][0]["name"] == tmp_path.name
    text = (tmp_path / "README.md").read_text()
    assert "<!-- results of kumi eval -->\n## Results\n" in text


def test_settings_of_the_harness_are_beside_its_results(tmp_path):
    other = TaskResult("piqa", "lm-eval multiple_choice", 4, {"acc": Metric(0.5, 0.1)})
    write_results(tmp_path, [_result(), other], "float32", "lm-evaluation-harness, 5 examples")
    rows = [line.split(" | ")[-1] for line in (tmp_path / "README.md").read_text().splitlines() if "| acc |" in line]
    assert rows == ["float32 |", "lm-evaluation-harness, 5 examples |"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("---\na: [\n---\n", "its YAML header is not valid"),
        ("---\n- a\n---\n", "its YAML header is a list, not keys with values"),
        ("---\n{a: 1, model-index: []}\n---\n", "model-index cannot be written into its YAML header"),
        ("---\nmodel-index: 3\n---\n", "model-index is not a list of models with results"),
        ("---\nmodel-index:\n- name: a\n---\n", "model-index is not a list of models with results"),
        (b"\xff\xfe", "is not UTF-8 text"),
    ],
)
def test_cards_that_cannot_be_changed_are_refused_before_the_evaluation(text, message, folder, capsys):
    (folder / "README.md").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=message):
        exported_folder(str(folder))
    assert main(["eval", str(folder), "--data", "nowhere.jsonl", "--write-card"]) == 2
    assert message in capsys.readouterr().err
    assert (folder / "README.md").read_bytes() == (text if isinstance(text, bytes) else text.encode())


def test_other_models_are_refused(folder, tmp_path, capsys):
    run = tmp_path / "run" / "checkpoints"
    run.mkdir(parents=True)
    for model in (run.parent, tmp_path / "nothing", "org/model"):
        with pytest.raises(ConfigError, match="is not an exported folder here"):
            exported_folder(str(model))
    shutil.move(folder / "README.md", tmp_path / "card.md")
    (folder / "README.md").symlink_to(tmp_path / "card.md")
    with pytest.raises(RefusedError, match="is a link"):
        exported_folder(str(folder))
