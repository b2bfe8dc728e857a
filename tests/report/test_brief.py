"""The brief answers twelve questions of readers, and the guide says on which line."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from kumi.cli import main
from kumi.config import plan_input
from kumi.config.model_plan import load_plan_or_model
from kumi.plan.session import plan
from kumi.report.brief import brief, title

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "guides" / "read-the-plan.md"

SIZE = r"[\d.]+ (?:B|KiB|MiB|GiB|TiB)"
TIME = r"[\d.]+ m?s"
# Question -> the line that answers it, and what an answer looks like.
QUESTIONS = {
    "Which layout should I use?": ("layout", r"microbatch \d+.*; .*among [\d,]+ that fit"),
    "How fast is it?": ("time", rf"{TIME} per step, [\d.]+[kMB]? tokens/s .* MFU [\d.]+%"),
    "How sure is this?": ("error", r"80% of such steps take .* to .* s, 90% take .* \d+ published experiments"),
    "Was something like it measured?": ("error", r"nearest: .* on [\d,]+ x .*, measured [\d.]+% (longer|shorter)"),
    "Does it fit with 5 GB to spare?": ("memory", rf"fits, {SIZE} spare \({SIZE} of it the margin\)"),
    "Might it run out of memory all the same?": ("memory", r"probability (over |under )?\d+%"),
    "How long does it take, and what does it cost?": ("cost", r"take [\d.,]+ (days|hours) \(.* to .*\).*cost"),
    "What limits it?": ("limit", r"(Compute-bound|bottleneck).*[\d.]+%"),
    "Would it be faster with more memory?": ("more memory", rf"no faster|with {SIZE} more per device, {TIME} per step"),
    "What if I have more or fewer nodes?": ("nodes", rf"\d+ nodes?: {TIME} \([\d.]+x the speed\).*cluster\.nodes=N"),
    "What is the next best layout, and is it worse?": ("runner-up", rf"microbatch .*{TIME} per step \([\d.]+% |none: "),
    "What should I try next?": ("next", r"measure .* 20 steps|plan with batch\.tokens|plan\.margin="),
    "Which command trains it?": ("train", r"kumi train|kumi cannot train .*; plan with --trainable"),
}
EXAMPLES = {
    "llama-3-8b": ["examples/plan/llama-3-8b.toml"],
    "llama-3-70b": ["examples/plan/llama-3-70b-aws.toml", "layout.tp=8"],
    "mixtral-8x7b": ["examples/plan/mixtral-8x7b.toml", "layout.pp=1", "layout.cp=1"],
}


@cache
def lines(name):
    run, *overrides = EXAMPLES[name]
    overrides = [f"model.source={ROOT / 'examples' / 'models' / name}", *overrides]
    config, _ = load_plan_or_model(str(ROOT / run), None, overrides)
    inputs = plan_input(config)
    made = plan(inputs.job, inputs.pinned, tokens=1e11, front=False, other_nodes=True)
    return title(made.job), brief(made)


@pytest.mark.parametrize("question", QUESTIONS)
@pytest.mark.parametrize("name", EXAMPLES)
def test_the_brief_answers(name, question):
    label, answer = QUESTIONS[question]
    (text,) = [line.text for line in lines(name)[1] if line.label == label]
    assert re.search(answer, text), text


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_brief_is_short_and_names_the_model_as_the_user_does(name):
    head, shown = lines(name)
    assert head.startswith(f"{name}, ")
    assert len(shown) <= 15
    assert max(len(line.text) for line in shown) <= 320


def test_the_guide_says_where_each_question_is_answered():
    table = re.findall(r"^\| ([^|]*\?) \| `([a-z -]+)`[^|]*\|$", GUIDE.read_text(), re.M)
    assert dict(table) == {question: label for question, (label, _) in QUESTIONS.items()}


def test_the_brief_is_the_default_and_explain_prints_the_rest(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    words = ["plan", "examples/plan/llama-3-8b.toml", "layout.zero=2", "layout.pp=1", "layout.cp=1", "layout.tp=1"]
    printed = []
    for flags in ([], ["--brief"], ["--explain"]):
        assert main([*words, *flags]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    assert len(printed[0].splitlines()) <= 28
    assert "Standard layouts for comparison" in printed[2]
    assert "Standard layouts for comparison" not in printed[0]
    assert "add [data] and [train] to it" in printed[0]
    with pytest.raises(SystemExit):
        main([*words, "--brief", "--explain"])
