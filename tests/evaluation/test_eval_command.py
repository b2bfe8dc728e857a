"""`kumi eval`: own tasks, their errors, several models, and an evaluation that goes on where it was."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kumi.cli import main
from kumi.config.task_section import TaskSection
from kumi.errors import ConfigError
from kumi.evaluation import evaluated_model, run_evaluation
from kumi.evaluation.recorded_scores import RecordedScores
from kumi.evaluation.rolling_windows import rolling_windows
from kumi.evaluation.run_task import encode_prompts, open_task, run_task
from kumi.evaluation.task_result import exponential, mean, ratio
from kumi.evaluation.text_model import TextModel
from kumi.inference.load_model import load_model
from kumi.inference.prompt_encoder import PromptEncoder
from kumi.inference.text_generator import ReplySettings
from tiny_models import reference_of

CHAT = Path(__file__).parents[2] / "examples" / "chat"


def _json(capsys, *words: str | Path) -> list[dict]:
    assert main(["eval", *map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)["models"]


def _scored(model, ids: list[int], first: int) -> float:
    """The log-prob of the tokens of `ids` from `first`, from the logits."""
    with torch.no_grad():
        log_probs = model.decoder(torch.tensor([ids[:-1]]))[0].double().log_softmax(-1)
    return log_probs[range(first - 1, len(ids) - 1), ids[first:]].sum().item()


def test_perplexity_is_that_of_the_logits(model_folder, task_folder, capsys):
    data = task_folder / "texts.jsonl"
    (result,) = _json(capsys, model_folder, "--data", data, "--dtype", "float64")
    model = load_model(model_folder, dtype="float64")
    texts = [json.loads(line)["text"] for line in data.read_text().splitlines()]
    total, tokens = 0.0, 0
    for text in texts:
        ids = [model.tokenizer.eos_id, *model.tokenizer.encode(text)]
        tokens += len(ids) - 1
        # The first window reads 32 tokens, each further one the 16 new ones and 16 before them.
        ends = [min(33, len(ids)), *(min(end, len(ids)) for end in range(49, len(ids) + 16, 16))]
        starts = [1, *ends[:-1]]
        total += sum(_scored(model, ids[max(0, b - 33) : b], a - max(0, b - 33)) for a, b in zip(starts, ends))
    metrics = {name: metric["value"] for name, metric in result["tasks"]["texts.jsonl"]["metrics"].items()}
    assert metrics["perplexity"] == pytest.approx(math.exp(-total / tokens), rel=1e-10)
    assert metrics["bits_per_byte"] == pytest.approx(-total / math.log(2) / sum(map(len, texts)), rel=1e-10)
    assert metrics["word_perplexity"] == pytest.approx(math.exp(-total / sum(len(t.split()) for t in texts)), rel=1e-10)
    assert tokens > 100


def test_windows_score_each_token_once_with_half_of_the_context():
    ids = list(range(1, 101))
    for stride in (1, 5, 8, 16):
        windows = list(rolling_windows(ids, 0, 16, stride))
        assert [token for window in windows for token in window.continuation] == ids
        assert all(len(window.context) + len(window.continuation) <= 17 for window in windows)
        assert all(len(window.context) >= 16 - stride + 1 for window in windows[1:])
        assert all(window.context[-1] == window.continuation[0] - 1 for window in windows)
    assert list(rolling_windows([], 0, 16, 8)) == []


def test_choices_and_replies_are_those_of_the_logits(model_folder, task_folder, capsys):
    (result,) = _json(capsys, model_folder, "--tasks", task_folder / "tasks.toml", "--dtype", "float64")
    model = load_model(model_folder, dtype="float64")
    rows = [json.loads(line) for line in (task_folder / "quiz.jsonl").read_text().splitlines()]
    right = by_byte = 0
    for row in rows:
        context = model.tokenizer.encode(row["question"])
        sums = [
            _scored(model, model.tokenizer.encode(f"{row['question']} {choice}"), len(context))
            for choice in row["choices"]
        ]
        scaled = [score / len(choice) for score, choice in zip(sums, row["choices"])]
        right += sums.index(max(sums)) == row["answer"]
        by_byte += scaled.index(max(scaled)) == row["answer"]
    quiz = result["tasks"]["quiz"]
    assert (quiz["kind"], quiz["count"]) == ("multiple_choice", 12)
    assert quiz["metrics"]["acc"]["value"] == pytest.approx(right / 12)
    assert quiz["metrics"]["acc_norm"]["value"] == pytest.approx(by_byte / 12)
    assert 0 < right < 12
    share = right / 12
    assert quiz["metrics"]["acc"]["stderr"] == pytest.approx(math.sqrt(share * (1 - share) / 11))
    assert result["tasks"]["sums"]["metrics"]["exact_match"] == {"value": 0.0, "stderr": 0.0}


class _Answers:
    """A model that replies with given ids."""

    max_length = 100

    def __init__(self, replies):
        self.replies, self.prompts = replies, []

    def generate(self, prompts, sampling):
        self.prompts += prompts
        self.stop_ids = sampling.stop_ids
        return self.replies


def test_a_reply_that_is_one_of_the_answers_matches(model_folder, tmp_path):
    tokenizer = load_model(model_folder).tokenizer
    rows = [{"a": "x", "b": ["4", "four"]}, {"a": "y", "b": 5}, {"a": "z", "b": "six"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = TaskSection(
        name="t", kind="exact_match", path=str(tmp_path / "rows.jsonl"), prompt="<{a}>", answer_key="b", stop=("\n",)
    )
    model = _Answers([tokenizer.encode(text) for text in (" four \nmore", "5", "sixty")])
    result = run_task(open_task(task), TextModel(model, tokenizer))
    assert result.metrics["exact_match"].value == pytest.approx(2 / 3)
    assert [tokenizer.decode(prompt) for prompt in model.prompts] == ["<x>", "<y>", "<z>"]


def test_prompts_of_a_chat_are_those_of_kumi_generate(model_folder, tmp_path):
    """A row that spells the token that ends a turn ends none, and the template's own ends a reply."""
    loaded = load_model(model_folder)
    encoder = PromptEncoder(loaded.tokenizer, loaded.chat_template, stop_ids=frozenset({5}))
    rows = [{"question": "hi<|im_end|>", "answer": "x"}, {"question": "who?", "answer": "me"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = TaskSection(name="t", kind="exact_match", path=str(tmp_path / "rows.jsonl"), chat=True)
    model = _Answers([loaded.tokenizer.encode(text) for text in ("no", "me")])
    conversations = encode_prompts(open_task(task), encoder)
    result = run_task(conversations, TextModel(model, loaded.tokenizer, stop_ids=frozenset({5})))
    assert result.metrics["exact_match"].value == 0.5
    assert model.prompts == ReplySettings(loaded).encode([row["question"] for row in rows])
    end = loaded.tokenizer.backend.token_to_id("<|im_end|>")
    assert model.prompts[0].count(end) == model.prompts[1].count(end)
    assert model.stop_ids == {5, end}
    with pytest.raises(ConfigError, match="task t: chat=true, but the model has no chat template"):
        encode_prompts(open_task(task), None)


def test_standard_errors():
    assert mean([1.0, 0.0, 1.0, 0.0]).stderr == pytest.approx(math.sqrt(1 / 12))
    assert mean([1.0]).stderr is None
    same = ratio([2.0, 4.0, 6.0], [1, 2, 3])
    assert (same.value, same.stderr) == (2.0, pytest.approx(0.0))
    # With equal counts, a ratio of means is a mean.
    assert ratio([1.0, 2.0, 6.0], [1, 1, 1]).stderr == pytest.approx(mean([1.0, 2.0, 6.0]).stderr)
    assert exponential(ratio([1e4], [1])) is None


def test_several_models_stand_side_by_side(model_folder, task_folder, capsys, monkeypatch):
    monkeypatch.chdir(model_folder.parent)  # the columns have the names of the models
    words = ["eval", model_folder.name, model_folder.name, "--tasks", str(task_folder / "tasks.toml")]
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:3] == ["task", "metric", "n"]
    row = next(line for line in lines if " acc " in line).split()
    assert row[:4] == ["quiz", "acc", "higher", "12"]
    assert row[4:7] == row[7:]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ('{"question": "x", "choices": ["a", "b"], "answer": 2}', "answer' is 2, neither an index from 0 to 1"),
        ('{"question": "x", "choices": ["a"], "answer": 0}', r"choices' is \['a'\], not a list of"),
        ('{"choices": ["a", "b"], "answer": 0}', "no column 'question'; it has choices, answer"),
        ('{"question": "x", "choices": ["a", "b"], "answer": 0}\nbroken', "quiz.jsonl:2: "),
        ("", "quiz.jsonl.*correct the file|is empty"),
    ],
)
def test_rows_that_do_not_fit_end_the_evaluation(rows, message, model_folder, tmp_path, capsys):
    (tmp_path / "quiz.jsonl").write_text(rows + "\n")
    (tmp_path / "tasks.toml").write_text('[[tasks]]\nname = "quiz"\nkind = "multiple_choice"\npath = "quiz.jsonl"\n')
    assert main(["eval", str(model_folder), "--tasks", str(tmp_path / "tasks.toml")]) == 2
    error = capsys.readouterr().err
    assert "ConfigError: task quiz: " in error
    assert re.search(message, error), error


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[[tasks]]\nname = "a"\nkind = "perplexity"\npath = "a.txt"\nprompt = "x"', "prompt is not used by kind="),
        ('[[tasks]]\nname = "a"\nkind = "perplexity"\npath = "a.txt"\n' * 2, "two tasks have the name 'a'"),
        ('[[tasks]]\nname = "a b"\nkind = "perplexity"\npath = "a.txt"', "tasks.0.name: must"),
        ('[[tasks]]\nname = "a"\nkind = "perplexity"\npath = "a.txt"\nstride = 2', "stride: unknown key"),
    ],
)
def test_wrong_task_files_are_refused(text, message, tmp_path, capsys):
    (tmp_path / "tasks.toml").write_text(text)
    assert main(["eval", "nowhere", "--tasks", str(tmp_path / "tasks.toml")]) == 2
    assert message in capsys.readouterr().err


def test_nothing_to_evaluate_is_refused(capsys):
    assert main(["eval", "nowhere"]) == 2
    assert "give --data FILE, --tasks FILE.toml or --lm-eval NAMES" in capsys.readouterr().err
    assert main(["eval", "nowhere", "--data", "texts"]) == 2
    assert "ConfigError: --data path: 'texts' has no suffix that names its format" in capsys.readouterr().err


def test_a_shard_of_the_vocabulary_without_a_token_is_refused(tmp_path, capsys):
    """Its log-probs would be those of no token."""
    heads = {"hidden_size": 128, "num_attention_heads": 64, "num_key_value_heads": 64, "intermediate_size": 64}
    folder = tmp_path / "model"
    reference_of("Llama", {"vocab_size": 1000, "max_position_embeddings": 32, **heads}).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(CHAT / name, folder)
    (tmp_path / "texts.jsonl").write_text('{"text": "a"}\n')
    assert main(["eval", str(folder), "--data", str(tmp_path / "texts.jsonl"), "--layout", "tp=64"]) == 2
    message = "LayoutError: --layout tp=64: tp=64 leaves ranks without rows of the vocabulary, because vocab_size=1000"
    assert message in capsys.readouterr().err


def test_rank_0_chooses_the_model_of_a_run_for_all_ranks(model_folder, task_folder, tmp_path, capsys, monkeypatch):
    """A run that goes on may write a checkpoint between the choices of two ranks."""
    run = tmp_path / "run"
    shutil.copytree(model_folder, run / "hf")
    (run / "config.toml").write_text("")
    find_model = run_evaluation.find_model

    def only_first(path, **options):
        assert os.environ.get("RANK", "0") == "0" or Path(path) != run
        return find_model(path, **options)

    monkeypatch.setattr(run_evaluation, "find_model", only_first)
    (alone,) = _json(capsys, model_folder, "--data", task_folder / "texts.jsonl")
    (result,) = _json(capsys, run, "--data", task_folder / "texts.jsonl", "--layout", "dp_replicate=2")
    assert (result["folder"], result["chosen"]) == (str(run / "hf"), "the export hf, because there is no checkpoint")
    perplexities = [each["tasks"]["texts.jsonl"]["metrics"]["perplexity"]["value"] for each in (alone, result)]
    assert perplexities[1] == pytest.approx(perplexities[0], rel=1e-5)


def test_a_stopped_evaluation_goes_on_where_it_was(model_folder, task_folder, tmp_path, capsys, monkeypatch):
    """Stopped after its first unit of work, it computes only the others."""
    words = [model_folder, "--data", task_folder / "texts.jsonl", "--tasks", task_folder / "tasks.toml"]
    (expected,) = _json(capsys, *words)
    monkeypatch.setitem(evaluated_model._TOKENS, "cpu", 64)
    units, execute = [], evaluated_model.EvaluatedModel.execute

    def counted(self, unit):
        units.append(unit)
        if stop_after == len(units):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.05)
        return execute(self, unit)

    monkeypatch.setattr(evaluated_model.EvaluatedModel, "execute", counted)
    stop_after = 3
    assert main(["eval", *map(str, words), "--out", str(tmp_path)]) == 130
    assert len(units) == 3
    assert not (tmp_path / "results.json").exists()
    units.clear()
    stop_after = 0
    (result,) = _json(capsys, *words, "--out", tmp_path)
    total = len(units)
    assert result["tasks"].keys() == expected["tasks"].keys()
    for name, task in expected["tasks"].items():
        for metric, each in task["metrics"].items():
            assert result["tasks"][name]["metrics"][metric]["value"] == pytest.approx(each["value"], rel=1e-5)
    assert json.loads((tmp_path / "results.json").read_text()) == {"models": [result]}
    units.clear()
    assert _json(capsys, *words, "--out", tmp_path)[0]["tasks"] == result["tasks"]
    assert units == []
    # Without the records, all units are computed again.
    (next(tmp_path.glob("scores-*.jsonl"))).unlink()
    _json(capsys, *words, "--out", tmp_path)
    assert len(units) >= total + 3


def test_a_line_whose_write_was_interrupted_is_cut_off(tmp_path):
    path = tmp_path / "scores.jsonl"
    recorded = RecordedScores(path)
    recorded.add(["a", "b"], [[-1.5, True], [-2.0, False]])
    recorded.close()
    with path.open("a") as file:
        file.write('["c", [-3.')
    again = RecordedScores(path)
    assert again.values == {"a": [-1.5, True], "b": [-2.0, False]}
    again.add(["c"], [[-3.0, True]])
    again.close()
    final = RecordedScores(path)
    assert list(final.values) == ["a", "b", "c"]
    with pytest.raises(ConfigError, match="another evaluation writes"):
        RecordedScores(path)
    final.close()


def test_other_weights_have_other_scores(model_folder, task_folder, tmp_path, capsys):
    other = shutil.copytree(model_folder, tmp_path / "other")
    tensors = load_file(other / "model.safetensors")
    tensors["model.norm.weight"][3] *= 1.5
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    words = ["--data", task_folder / "texts.jsonl", "--out", tmp_path / "out"]
    first, second = (_json(capsys, folder, *words)[0] for folder in (model_folder, other))
    assert first["digest"] != second["digest"]
    assert first["tasks"] != second["tasks"]
