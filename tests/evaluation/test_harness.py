"""lm-evaluation-harness: the same results as with transformers, and tasks that cannot run code unasked."""

from __future__ import annotations

import json
import sys

import pytest

from kumi.cli import main
from kumi.errors import ConfigError
from kumi.evaluation.harness_tasks import check_task_folder

TASKS = {
    "choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "answer",
        "metric_list": [{"metric": name} for name in ("acc", "acc_norm", "acc_bytes")],
        "num_fewshot": 1,
        "fewshot_split": "test",
    },
    "generation": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "exact_match"}, {"metric": "chrf"}],
        "generation_kwargs": {"until": ["\n", "ou"], "max_gen_toks": 12},
    },
    "rolling": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": name} for name in ("word_perplexity", "byte_perplexity", "bits_per_byte")],
    },
}
FILES = {"choice": "quiz", "generation": "sums", "rolling": "texts"}


@pytest.fixture(scope="module")
def harness_folder(task_folder, tmp_path_factory):
    """A folder with the tasks of `TASKS`; JSON is YAML, too."""
    folder = tmp_path_factory.mktemp("harness")
    for name, task in TASKS.items():
        data = str(task_folder / f"{FILES[name]}.jsonl")
        source = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": data}}, "test_split": "test"}
        (folder / f"{name}.yaml").write_text(json.dumps({"task": name, **source, **task}))
    return folder


def _numbers(output: dict) -> dict[str, float]:
    return {
        f"{task} {key.removesuffix(',none')}": value
        for task, values in output["results"].items()
        for key, value in values.items()
        if "," in key and "stderr" not in key
    }


def test_it_agrees_with_transformers(model_folder, harness_folder, tmp_path, monkeypatch, capsys):
    lm_eval = pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed (pip install 'kumi[eval]')")
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    manager = TaskManager(include_path=str(harness_folder), include_defaults=False)
    model = HFLM(str(model_folder), device="cpu", dtype="float32", batch_size=2)
    options = {"bootstrap_iters": 10, "log_samples": False}
    expected = _numbers(lm_eval.simple_evaluate(model=model, tasks=list(TASKS), task_manager=manager, **options))
    words = [str(model_folder), "--lm-eval", ",".join(TASKS), "--include-path", str(harness_folder), "--json"]
    capsys.readouterr()
    assert main(["eval", *words]) == 0
    tasks = json.loads(capsys.readouterr().out)["models"][0]["tasks"]
    actual = {
        f"{task} {name}": metric["value"]
        for task, result in tasks.items()
        for name, metric in result["metrics"].items()
    }
    assert len(expected) == 8
    assert actual == pytest.approx(expected, rel=1e-4)
    assert {task: result["count"] for task, result in tasks.items()} == {"choice": 12, "generation": 4, "rolling": 4}
    assert tasks["choice"]["kind"] == "lm-eval multiple_choice"


def test_templates_run_in_a_sandbox(model_folder, harness_folder, tmp_path, capsys, monkeypatch):
    """Outside of it, a template reaches every function of Python."""
    pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed (pip install 'kumi[eval]')")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    task = json.loads((harness_folder / "choice.yaml").read_text())
    task |= {"task": "attack", "doc_to_text": "{{ cycler.__init__.__globals__.os.getcwd() }}", "num_fewshot": 0}
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "attack.yaml").write_text(json.dumps(task))
    with pytest.raises(Exception, match="access to attribute '__init__'"):
        main(["eval", str(model_folder), "--lm-eval", "attack", "--include-path", str(tmp_path / "tasks")])


@pytest.mark.parametrize(
    ("file", "text", "reason"),
    [
        ("utils.py", "", "is code"),
        ("a.yaml", "task: a\nprocess_docs: !function utils.f\n", "tag '!function', which runs code"),
        ("a.yaml", "task: !!python/object/apply:os.getcwd []\n", "python/object/apply:os.getcwd', which runs code"),
        ("a.yaml", "metric_list:\n  - metric: bleu\n    hf_evaluate: true\n", "sets hf_evaluate"),
        ("a.yaml", "include: ../other.yaml\n", "includes '../other.yaml', which is outside"),
        ("a.yaml", "dataset_path: ./loader\n", "reads the data set './loader' from this machine"),
        ("a.yaml", "dataset_path: pandas\n", "reads data with 'pandas'"),
        ("sub/data.pkl", "", "is code"),
        ("a.yaml", "task: [\n", "cannot be read as YAML"),
    ],
)
def test_folders_with_code_are_refused(file, text, reason, tmp_path):
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(text)
    with pytest.raises(ConfigError, match=reason.replace("[", r"\[")) as error:
        check_task_folder(tmp_path)
    assert "--trust-task-code" in str(error.value) or "YAML" in str(error.value)


def test_a_folder_without_code_is_accepted(harness_folder, tmp_path):
    check_task_folder(harness_folder)
    (tmp_path / "base_yaml").write_text("dataset_path: json\n")
    (tmp_path / "a.yaml").write_text("include: base_yaml\ntask: a\ndataset_path: org/name\n")
    check_task_folder(tmp_path)
    with pytest.raises(ConfigError, match="is not a folder"):
        check_task_folder(tmp_path / "nowhere")


def test_its_flags_need_it(capsys, monkeypatch):
    assert main(["eval", "nowhere", "--data", "x.txt", "--limit", "3"]) == 2
    assert "--limit has no effect without --lm-eval" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setattr("kumi.cli.eval.find_spec", lambda name: None)
    assert main(["eval", "nowhere", "--lm-eval", "piqa"]) == 2
    assert "pip install 'kumi[eval]'" in capsys.readouterr().err
