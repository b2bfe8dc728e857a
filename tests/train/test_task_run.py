"""Tasks in a run: values of `kumi eval` on its checkpoints, on every layout; the best checkpoint by them; resumes."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
from pathlib import Path

import pytest
from tests.train.conftest import WORDS, back_to, losses, metrics, run_file

from kumi.cli import main
from kumi.config import load, resolve
from kumi.config.stored_config import load_stored_config
from kumi.errors import ConfigError
from kumi.objectives import OBJECTIVES
from kumi.train.best_checkpoint import BestSoFar, check_metric, is_higher_better

STEPS = 4
OPTIM = {"lr": 3e-2, "warmup_steps": 0, "schedule": "constant"}
ALPHABET = "abcdefghijklmnopqrstuvwxyz"
# Words, and what a tokenizer may divide them into.
PIECES = [*WORDS, *(first + second for first in ALPHABET for second in ("", *ALPHABET))]
TASKS = """
[[tasks]]
name = "quiz"
kind = "multiple_choice"
path = "quiz.jsonl"

[[tasks]]
name = "texts"
kind = "perplexity"
path = "texts.jsonl"
"""
REPLIES = """
[[tasks]]
name = "words"
kind = "exact_match"
path = "words.jsonl"
max_new_tokens = 1
"""


def write_tasks(folder: Path, text: str = TASKS) -> None:
    """Write a file of tasks in `folder`, and their rows."""
    draw = random.Random(1)

    def words(least: int, most: int) -> str:
        return " ".join(draw.choices(WORDS, k=draw.randint(least, most)))

    quiz = [
        {"question": words(2, 9), "choices": [words(1, 3) for _ in range(3)], "answer": draw.randrange(3)}
        for _ in range(40)
    ]
    rows = {
        "quiz": quiz,
        "texts": [{"text": words(1, 60)} for _ in range(9)],
        # A reply is right for half of the questions, by its first letter.
        "words": [
            {"question": words(1, 6), "answer": [piece for piece in PIECES if (piece[0] < "m") == (number % 2 == 0)]}
            for number in range(20)
        ],
    }
    for name, items in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    (folder / "tasks.toml").write_text(text)


def train(folder: Path, *overrides: str, code: int = 0, **changes) -> Path:
    """Train in `folder`, with tasks after every second step; return the run folder."""
    sections = {
        "eval": {"every": 2, "task_files": ["tasks.toml"]},
        "train": {"steps": STEPS, "out": "tasked"},
        "precision": {"kind": "fp64"},
        "checkpoint": {"every": 2, "keep": 9},
        "optim": OPTIM,
    }
    path = run_file(folder, **(sections | changes))
    with contextlib.chdir(folder):
        assert main(["train", str(path), *overrides]) == code
    return folder / "tasked"


def values(out: Path, step: int) -> dict[str, float]:
    """The metrics of tasks after `step` steps, by `<task>/<metric>`."""
    (entry,) = (entry for entry in metrics(out) if entry["step"] == step and "time/tasks_s" in entry)
    return {key.removeprefix("eval/"): value for key, value in entry.items() if key.startswith("eval/")}


def scored(folder: Path, model: Path, capsys, tasks: str = "tasks.toml") -> dict[str, float]:
    """The metrics of `kumi eval` for `model`, in the same form."""
    capsys.readouterr()
    words = [str(model), "--tasks", tasks, "--dtype", "float64", "--max-length", "32", "--json"]
    with contextlib.chdir(folder):
        assert main(["eval", *words]) == 0
    (result,) = json.loads(capsys.readouterr().out)["models"]
    numbers = {}
    for task, each in result["tasks"].items():
        for name, metric in each["metrics"].items():
            numbers |= {f"{task}/{name}": metric["value"], f"{task}/{name}_stderr": metric["stderr"]}
    return numbers


@pytest.fixture(scope="module")
def alone(small, tmp_path_factory) -> Path:
    """A folder with a run of one rank that evaluates all kinds of tasks."""
    folder = small.copy(tmp_path_factory.mktemp("alone"))
    write_tasks(folder, TASKS + REPLIES)
    train(folder)
    return folder


def test_values_are_those_of_kumi_eval_on_the_checkpoints(alone, capsys):
    for step in (2, 4):
        expected = scored(alone, Path(f"tasked/checkpoints/step_{step:06d}"), capsys)
        assert len(expected) == 2 * (2 + 4 + 1)
        assert values(alone / "tasked", step) == pytest.approx(expected, rel=1e-12)
    assert values(alone / "tasked", 2) != values(alone / "tasked", 4)
    assert 0 < values(alone / "tasked", 4)["words/exact_match"] < 1
    # Weights of the export are rounded to float32.
    exported = scored(alone, Path("tasked/hf"), capsys)
    assert exported == pytest.approx(values(alone / "tasked", 4), rel=1e-6)


def test_the_model_card_has_the_results_of_tasks(alone):
    card, final = (alone / "tasked/hf/README.md").read_text(), values(alone / "tasked", 4)
    assert "Tasks, after step 4:" in card
    error = final["quiz/acc_stderr"]
    assert f"| quiz | acc | {final['quiz/acc']:.4f} | {error:.4f} |" in card
    assert f"| texts | perplexity | {final['texts/perplexity']:.4f} | " in card


def test_tasks_change_nothing_of_the_training(alone):
    with contextlib.chdir(alone):
        changes = {"precision": {"kind": "fp64"}, "optim": OPTIM}
        path = run_file(alone, train={"steps": STEPS, "out": "plain"}, **changes)
        assert main(["train", str(path)]) == 0
    assert losses(alone / "plain") == losses(alone / "tasked")


LAYOUTS = [
    pytest.param({"tp": 2}, id="tp"),
    pytest.param({"dp_replicate": 2}, id="dp"),
    pytest.param({"dp_shard": 2, "zero": 3}, id="zero-3"),
    pytest.param({"pp": 2}, id="pp"),
    pytest.param({"cp": 2}, id="cp", marks=pytest.mark.exhaustive),
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_has_the_values_of_one_rank(small, alone, tmp_path, layout):
    """Replies, too, unless the layout has stages or parts of sequences."""
    folder, generates = small.copy(tmp_path), "pp" not in layout and "cp" not in layout
    write_tasks(folder, TASKS + REPLIES if generates else TASKS)
    out = train(folder, cluster={"devices_per_node": 2}, layout=layout)
    for step in (2, 4):
        expected = values(alone / "tasked", step)
        if not generates:
            expected = {name: value for name, value in expected.items() if not name.startswith("words/")}
        assert values(out, step) == pytest.approx(expected, rel=1e-9)


def test_the_best_checkpoint_by_a_metric_of_a_task(alone, small, tmp_path, capfd):
    """Higher is better for `acc`, and the intervals of tasks and held-out data differ."""
    folder = small.copy(tmp_path)
    write_tasks(folder)
    section = {"every": 4, "tasks_every": 1, "task_files": ["tasks.toml"]}
    options = {"eval": section, "train": {"steps": 8, "out": "tasked"}}
    out = train(folder, checkpoint={"every": 9, "keep": 1, "best": "eval/quiz/acc"}, **options)
    accuracies = {step: values(out, step)["quiz/acc"] for step in range(1, 9)}
    best = max(accuracies, key=accuracies.get)
    assert len(set(accuracies.values())) > 1
    expected = {"step": best, "metric": "eval/quiz/acc", "value": accuracies[best]}
    assert json.loads((out / "checkpoints" / "best.json").read_text()) == expected
    assert (out / "checkpoints" / f"step_{best:06d}").is_dir()
    assert [entry["step"] for entry in metrics(out) if "eval/loss" in entry] == [4, 8]
    output = capfd.readouterr().out
    assert f"best eval/quiz/acc {accuracies[best]:.4f}, with the checkpoint of step {best}" in output
    assert f"  quiz: acc {accuracies[best]:.4f} ± " in output
    assert f"task quiz: acc {accuracies[1]:.4f} -> {accuracies[8]:.4f}, acc_norm " in output
    shutil.rmtree(out)
    patient = options | {"train": {"steps": 8, "out": "tasked", "patience": 1}}
    train(folder, checkpoint={"every": 9, "keep": 1, "best": "eval/quiz/acc"}, **patient)
    first = next(step for step in range(2, 9) if accuracies[step] <= max(accuracies[n] for n in range(1, step)))
    assert f"ended after step {first}: eval/quiz/acc was best after step " in capfd.readouterr().out


def test_a_resumed_run_keeps_its_tasks_and_the_best(small, tmp_path):
    folder = small.copy(tmp_path)
    write_tasks(folder)
    changes = {"checkpoint": {"every": 2, "keep": 9, "best": "eval/texts/bits_per_byte"}}
    out = train(folder, **changes)
    best = (out / "checkpoints" / "best.json").read_text()
    before = {step: values(out, step) for step in (2, 4)}
    back_to(out, 2)
    # The run folder has the tasks themselves, so it resumes without the file that named them.
    (folder / "tasks.toml").unlink()
    stored = load_stored_config(out)
    assert [task.name for task in stored.eval.tasks] == ["quiz", "texts"]
    assert stored.eval.task_files == ()
    with contextlib.chdir(folder):
        assert main(["train", str(out / "config.toml")]) == 0
    assert {step: values(out, step) for step in (2, 4)} == before
    assert (out / "checkpoints" / "best.json").read_text() == best


def test_a_run_without_held_out_data_evaluates_its_tasks(small, tmp_path):
    """Also at the end, if no step is due."""
    folder = small.copy(tmp_path)
    write_tasks(folder)
    data = {"tokenizer": {"vocab_size": 300}, "validation": 0.0, "workers": 1, "sources": [{"path": "documents.jsonl"}]}
    tasks = [{"name": "quiz", "kind": "multiple_choice", "path": "quiz.jsonl", "prompt": "{question}:"}]
    out = train(folder, data=data, eval={"every": 3, "tasks": tasks})
    assert [entry["step"] for entry in metrics(out) if "eval/quiz/acc" in entry] == [3, 4]
    assert not any("eval/loss" in entry for entry in metrics(out))


@pytest.fixture
def refused(small, tmp_path, capfd):
    """refused(tasks, changes) -> the error of a run that does not start; its folder is not made."""
    folder = small.copy(tmp_path)

    def check(tasks=TASKS, prepare=lambda folder: None, **changes) -> str:
        write_tasks(folder, tasks)
        prepare(folder)
        out = train(folder, code=2, **changes)
        assert not out.exists()
        return capfd.readouterr().err.strip()

    return check


@pytest.mark.parametrize("axis", ["pp", "cp"])
def test_replies_on_a_layout_without_generation_are_refused(refused, axis):
    error = refused(TASKS + REPLIES, cluster={"devices_per_node": 2}, layout={axis: 2})
    assert f"task 'words' of eval.tasks, of kind 'exact_match', needs layout.{axis} = 1, but it is 2" in error


def test_missing_and_malformed_files_are_refused_before_the_run(refused):
    error = refused(prepare=lambda folder: (folder / "tasks.toml").unlink())
    assert "tasks.toml (looked for from " in error
    assert "task quiz: quiz.jsonl (looked for from " in refused(prepare=lambda folder: (folder / "quiz.jsonl").unlink())
    error = refused(prepare=lambda folder: (folder / "quiz.jsonl").write_text('{"question": "a", "choices": ["b"]}\n'))
    assert "task quiz: quiz.jsonl:1: column 'choices' is ['b'], not a list of two or more texts; correct" in error
    assert "stride: unknown key" in refused(TASKS + "stride = 3\n")
    error = refused(TASKS + REPLIES + "chat = true\n")
    assert "the tokenizer has no chat template" in error
    error = refused(TASKS.replace("texts", "loss", 1))
    assert "eval.task_files: the task name 'loss' is that of a metric of held-out data" in error
    error = refused(eval={"every": 2, "task_files": ["tasks.toml", "tasks.toml"]})
    assert "eval.task_files: two tasks have the name 'quiz'" in error
    assert "eval: tasks_every=3 has no tasks; add [[eval.tasks]]" in refused(eval={"tasks_every": 3})


def test_a_metric_that_no_task_has_is_refused(small, tmp_path, capfd):
    folder = small.copy(tmp_path)
    write_tasks(folder)
    train(folder, code=2, checkpoint={"best": "eval/quiz/ac"})
    error = capfd.readouterr().err
    assert (
        "did you mean 'eval/quiz/acc'? the metrics are eval/loss, eval/quiz/acc, eval/quiz/acc_norm, eval/texts/"
        in error
    )
    train(folder, code=2, checkpoint={"best": "eval/quiz/acc"}, eval={"task_files": ["tasks.toml"]})
    assert "needs evaluations during training; set eval.tasks_every" in capfd.readouterr().err
    train(folder, code=2, checkpoint={"best": "eval/loss"}, eval={"tasks_every": 2, "task_files": ["tasks.toml"]})
    assert "needs evaluations during training; set eval.every" in capfd.readouterr().err


def test_a_reward_model_has_no_tasks(small, tmp_path):
    write_tasks(small.copy(tmp_path))
    path = run_file(tmp_path, eval={"task_files": [str(tmp_path / "tasks.toml")]}, objective={"kind": "reward"})
    with pytest.raises(ConfigError, match=r"task 'quiz' needs log-probs of tokens, which the reward model"):
        resolve(load(path))


def test_directions_of_metrics_of_tasks():
    assert is_higher_better("quiz/acc_norm")
    assert not is_higher_better("quiz/bits_per_byte")
    with pytest.raises(ConfigError, match="has no direction"):
        is_higher_better("quiz/size")
    # A task that was added later, and one whose perplexity was too large for a float.
    entries = [
        {"step": 1, "eval/loss": 1.0},
        {"step": 1, "eval/texts/bits_per_byte": 4.0},
        {"step": 2, "eval/loss": 1.0},
        {"step": 2, "eval/texts/bits_per_byte": 3.0, "eval/texts/perplexity": 8.0},
    ]
    best = BestSoFar("texts/perplexity", entries)
    assert (best.step, best.value, best.since) == (2, 8.0, 0)
    best = BestSoFar("texts/bits_per_byte", [*entries, {"step": 3, "eval/loss": 0.5}])
    assert (best.step, best.since) == (2, 0)
    with pytest.raises(ConfigError, match="needs held-out data, but the data is so small"):
        check_metric("eval/loss", OBJECTIVES["lm"](), [])


def test_a_text_that_is_too_long_ends_the_run_in_its_first_step(small, tmp_path, capfd):
    """The preflight check looks at all texts, and computes the first batch of each task, the one with the longest."""
    folder = small.copy(tmp_path)
    write_tasks(folder)
    row = {"question": "a", "choices": ["the", " ".join(WORDS * 3)], "answer": 0}
    with (folder / "quiz.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    out = train(folder, code=2, eval={"task_files": ["tasks.toml"]})
    assert "tokens is to be scored as a whole, but the model reads at most 32 tokens" in capfd.readouterr().err
    assert not any("train/loss" in entry for entry in metrics(out))
    longer = train(folder, "eval.max_length=64", eval={"task_files": ["tasks.toml"]}, code=2)
    assert "but the model reads at most 64 tokens" in capfd.readouterr().err
    assert out == longer
