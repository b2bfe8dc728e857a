"""Every command in the README and the docs runs, on less data and fewer steps; every link leads somewhere."""

import contextlib
import importlib.util
import json
import re
import shlex
from pathlib import Path

import pytest
import torch

from kumi.cli import main
from kumi.config.reference import run_file_page
from kumi.spec import ledger

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]

# Its runs are compared with each other, in test_tutorial.py.
TUTORIAL = ROOT / "docs" / "parallelism" / "tutorial.md"
# Needs a package; in tests/rollout/test_reasoning_recipe.py.
REASONING = ROOT / "docs" / "guides" / "reasoning.md"

# Overrides that make the quickstart small: a few files, a shallow model, a handful of steps.
SMALL = [
    'data.sources=[{path="{stdlib}/email/*.py"}]',
    "data.validation=0.2",
    "data.workers=1",
    "eval.sequences=4",
    "model.config.num_hidden_layers=1",
    "model.config.hidden_size=32",
    "data.tokenizer.vocab_size=400",
    "model.config.intermediate_size=32",
]
# What makes the search of a plan small; test_the_guides_show_what_kumi_prints and tests/plan search without.
PINS = ["layout.cp=1", "layout.microbatch=1"]
STEPS, MORE = 4, 6  # MORE: of commands that train a finished run on
# These train a model that is there, with its tokenizer.
GIVEN = ("examples/lora.toml", "first-run.toml")
# Their data and their model are small.
BUNDLED = ("examples/chat.toml", "examples/dpo.toml")
# Instead of the reader's texts and a model from the hub, which a page's own run file names.
OWN = ["model.source=runs/quickstart/hf", "data.tokenizer=runs/quickstart/hf", "batch.seq_len=64"]


def made():
    """Return the kumi command of each target of the Makefile."""
    return dict(re.findall(r"^(\w+):.*\n\t\$\(BIN\)/(kumi .*)$", (ROOT / "Makefile").read_text(), re.M))


def commands(page):
    """The kumi commands in the code blocks of `page`, as lists of words, without prompts and remarks; those that make
    runs, as it runs them."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.M | re.S)
    lines = (
        line.strip() for language, block in blocks if language in ("", "bash", "sh") for line in block.splitlines()
    )
    words = (shlex.split(line, comments=True) for line in lines if re.match(r"make|kumi (?!VERB)", line))
    return [shlex.split(made()[line[1]]) if line[0] == "make" else line for line in words]


def shrunk(words):
    """Return the command for a small run or search: overrides are added, and steps come down."""
    words = [word.replace("step_000400", f"step_{STEPS:06d}") for word in words[1:]]
    if words[0] in ("plan", "describe") and words[1].startswith(("examples/plan/", "examples/models/")):
        pinned = {word.partition("=")[0] for word in words}
        return words + [pin for pin in PINS if pin.partition("=")[0] not in pinned]
    if words[0] not in ("train", "describe", "data") or not any(word.endswith(".toml") for word in words):
        return words
    if bundled := next((word for word in words if word in BUNDLED), None):
        position = words.index(bundled) + 1
        return [*words[:position], "data.workers=1", "train.epochs=0.5", *words[position:]]
    words = [word.replace("train.steps=500", f"train.steps={MORE}") for word in words]
    words = [re.sub(r"train.steps=\d{2,}", f"train.steps={STEPS}", word) for word in words]
    steps = [] if any(word.startswith("train.steps") for word in words) else [f"train.steps={STEPS}"]
    position = next(index for index, word in enumerate(words) if word.endswith(".toml")) + 1
    given = words[position - 1] in GIVEN
    small = [word for word in SMALL if not (given and word.startswith(("model.", "data.tokenizer")))]
    if words[position - 1] == "first-run.toml":
        small = [*OWN, "batch.tokens_per_step=256", *(word for word in small if not word.startswith("data.sources"))]
    return [*words[:position], *small, *steps, *words[position:]]


def run_file(page):
    """The text of the run file on `page`."""
    (text,) = re.findall(r"^```toml\n(# first-run.toml\n.*?)^```", page.read_text(), re.M | re.S)
    return text


def test_the_readme_s_commands_run_in_order(tmp_path, capfd):
    for name in ("examples", "README.md"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "first-run.toml").write_text(run_file(ROOT / "docs" / "guides" / "first-run.md"))
    texts = [{"text": page.read_text()} for page in PAGES]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    lines = sorted(
        dict.fromkeys(
            tuple(command) for page in PAGES if page not in (TUTORIAL, REASONING) for command in commands(page)
        ),
        key=lambda words: words[1] != "train",
    )
    assert len(lines) >= 6
    with contextlib.chdir(tmp_path):
        for words in lines:
            code, output = main(shrunk(list(words))), capfd.readouterr().out
            # Another test takes one of the CPUs, which the doctor notices.
            slowed = words[1] == "doctor" and code == 2 and "; 1 failed: device speed" in output
            assert code == 0 or slowed, (words, output)
        (block,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
        names = {"token_ids": torch.zeros((2, 5), dtype=torch.int64)}
        exec(block, names)
        assert names["logits"].shape == (2, 5, 4096)


def test_the_readme_says_what_its_first_commands_run():
    page = (ROOT / "README.md").read_text()
    assert made()
    for target, command in made().items():
        assert re.search(rf"`make {target}`\s+runs\s+`{re.escape(command)}`", page), target
        assert re.search(rf"^make {target} ", page, re.M), target


def test_the_readme_s_figures_are_the_ledger_s():
    from kumi.config import load, resolve

    run = resolve(load(ROOT / "examples" / "quickstart.toml"))
    assert f"{ledger.num_params(run.model) / 1e6:.1f} M parameter Llama" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    targets = re.findall(r"\]\(([^)#]+)", page.read_text())
    missing = [target for target in targets if "://" not in target and not (page.parent / target).exists()]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_is_quoted_is_what_the_source_says(page):
    quotes = re.findall(r"^<!-- quoted: (\S+) -->\n```\w+\n(.*?)^```", page.read_text(), re.M | re.S)
    assert len(quotes) == page.read_text().count("<!-- quoted:")
    assert [text for file, text in quotes if text not in (ROOT / file).read_text()] == []


def test_a_family_is_quoted_whole():
    page, file = ROOT / "docs" / "adding-a-family.md", "src/kumi/spec/families/olmo2.py"
    quotes = re.findall(rf"^<!-- quoted: {file} -->\n```\w+\n(.*?)^```", page.read_text(), re.M | re.S)
    assert "\n\n\n".join(text.rstrip() for text in quotes) == (ROOT / file).read_text().rstrip()


def test_the_reference_of_run_files_is_up_to_date():
    assert (ROOT / "docs" / "run-file.md").read_text() == run_file_page()


def keys():
    """Return every key of a run file, as `section.key`, from the reference."""
    sections = re.findall(r"^## \[([\w.]+)\]\n(.*?)(?=^## |\Z)", run_file_page(), re.M | re.S)
    return {f"{section}.{key}" for section, text in sections for key in re.findall(r"^\| `(\w+)` \|", text, re.M)}


def test_keys_that_the_guide_for_users_of_other_trainers_names_exist():
    page = (ROOT / "docs" / "guides" / "coming-from.md").read_text()
    rows = [line.split("|") for line in page.splitlines() if line.startswith("|")]
    named = {key for row in rows for key in re.findall(r"`([a-z]+(?:\.\w+)+)`", row[-2])}
    assert len(named) > 30
    assert named <= keys()


@pytest.mark.parametrize(("guide", "answered"), [("chat-data", 9), ("training-complaints", 13)])
def test_the_tests_that_answer_complaints_exist(guide, answered):
    page = ROOT / "docs" / "guides" / f"{guide}.md"
    _, table = page.read_text().split("| complaint | kumi | test |")
    rows = table.partition("\n\n")[0].strip().splitlines()[1:]
    tests = [re.findall(r"\[(test_\w+)\]\(([^)]+)\)", row) for row in rows]
    assert len(rows) == answered
    assert all(tests)
    absent = [
        (name, file) for row in tests for name, file in row if f"def {name}(" not in (page.parent / file).read_text()
    ]
    assert absent == []


def test_the_picture_of_trained_tokens_is_what_kumi_shows():
    script = ROOT / "docs" / "images" / "data_show.py"
    spec = importlib.util.spec_from_file_location("docs_data_show", script)
    drawing = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(drawing)
    picture = drawing.draw(drawing.units())
    assert picture == drawing.PICTURE.read_text()
    assert re.findall(r"\w+://[^\"' ]+", picture) == ["http://www.w3.org/2000/svg"]
    assert "font-face" not in picture


def test_the_guides_show_what_kumi_prints(monkeypatch):
    monkeypatch.chdir(ROOT)
    spec = importlib.util.spec_from_file_location("docs_outputs", ROOT / "docs" / "guides" / "outputs.py")
    outputs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(outputs)
    printed = outputs.sections()
    for page in outputs.PAGES:
        text = page.read_text()
        assert text.count("<!-- printed:") == len(outputs.BLOCK.findall(text)) == text.count("<!-- end -->"), page
        assert outputs.refreshed(text, printed) == text, f"{page.name}: run python docs/guides/outputs.py"
