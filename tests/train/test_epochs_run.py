"""Runs in epochs over several sources: exact passes, resumes, and the validation losses of each source."""

import contextlib
import json
import shutil

import numpy as np
import pytest
import torch
from tests.train.conftest import back_to, losses, metrics, run_file

from kumi import load_decoder
from kumi.cli import main
from kumi.config import load
from kumi.config.run_length import run_mixture, run_steps, sequences_of_epochs
from kumi.data import open_store

PASSES = (1, 3)
NAMES = ("numbers_jsonl", "squares_jsonl")


def write_run(folder, **changes):
    sources = [{"path": f"{name}.jsonl", "epochs": n} for name, n in zip(("numbers", "squares"), PASSES, strict=True)]
    length = {"epochs": 2, "out": "run"}
    return run_file(folder, **{"data__sources": sources, "train": length, "data__cross_document": True, **changes})


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run of two epochs over two sources, the second read three times in each."""
    folder = tmp_path_factory.mktemp("epochs")
    for name, count, power in (("numbers", 120, 1), ("squares", 30, 2)):
        texts = (" ".join(str((number + n) ** power) for n in range(number % 7 + 2)) for number in range(count))
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    with contextlib.chdir(folder):
        assert main(["train", str(write_run(folder, optim={"lr": 1e-2, "schedule": "constant"}))]) == 0
    return folder


@pytest.fixture
def copy(finished, tmp_path, monkeypatch):
    """A copy of the finished run, in the working directory."""
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def opened(folder):
    """The configuration of the run in `folder`, and its data."""
    return load(folder / "run.toml", {"data.cache": str(folder / "tokens")}), open_store(folder / "tokens" / "tokens")


def test_every_row_is_trained_on_exactly_as_often_as_epochs_say(finished):
    config, store = opened(finished)
    mixture, sequences = run_mixture(config, store), sequences_of_epochs(config, store)
    steps = run_steps(config)
    assert list(losses(finished / "run")) == list(range(1, steps + 1))
    per_step = config.batch.tokens_per_step // config.batch.seq_len
    assert 0 < steps * per_step - sequences < per_step, "the last step of this run is filled up"
    part, _, row = mixture.locate(0, sequences)
    for number, (passes, source) in enumerate(zip(PASSES, mixture.sources, strict=True)):
        often = np.bincount(row[part == number], minlength=source.rows)
        assert often.tolist() == [2 * passes] * source.rows


def test_a_resume_in_a_later_epoch_equals_the_run_that_was_not_interrupted(copy, finished):
    """A run that begins each epoch in the order of the first has other losses from here on."""
    steps = len(losses(finished / "run"))
    step = steps // 2 + 2 - steps // 2 % 2  # a checkpoint, in the second epoch
    back_to(copy / "run", step)
    assert main(["train", "run.toml"]) == 0
    assert losses(copy / "run") == losses(finished / "run")
    mixture = run_mixture(*opened(copy))
    first, second = (mixture.locate(start, mixture.round) for start in (0, mixture.round))
    assert not np.array_equal(first[2], second[2])


def test_more_epochs_go_on_with_the_rows_that_come_next(copy, finished, capsys):
    assert main(["train", "run.toml", "train.epochs=3"]) == 2
    assert "train.epochs: 2.0 -> 3.0" in capsys.readouterr().err
    assert main(["train", "run.toml", "train.epochs=3", "--allow-change", "train.epochs"]) == 0
    printed = capsys.readouterr().out
    more = losses(copy / "run")
    assert len(more) == run_steps(load("run.toml", ["train.epochs=3"])) > len(losses(finished / "run"))
    assert "3 epochs are " in printed
    assert "train.epochs=6.0 --allow-change train.epochs" in printed
    assert main(["train", "run.toml", "train.epochs=3", "train.out=whole"]) == 0
    assert losses(copy / "whole") == more


def test_steps_of_another_size_are_refused_in_a_run_of_epochs(copy, capsys):
    back_to(copy / "run", 4)
    code = main(["train", "run.toml", "batch.tokens_per_step=512", "--allow-change", "batch.tokens_per_step"])
    assert code == 2
    assert (
        "has trained on 32 sequences in 4 steps, and batch.tokens_per_step is 512 now, 16 sequences, so the steps of "
        "train.epochs=2 would end elsewhere; restore batch.tokens_per_step, or give train.steps"
    ) in capsys.readouterr().err


def test_the_run_says_how_often_it_reads_each_source(copy, capsys):
    shutil.rmtree("tokens")
    assert main(["describe", "run.toml"]) == 0
    assert "2 epochs; steps follow from the data, which is not prepared" in capsys.readouterr().out
    assert main(["data", "prepare", "run.toml"]) == 0
    capsys.readouterr()
    assert main(["data", "inspect", "run.toml", "--json"]) == 0
    reading = json.loads(capsys.readouterr().out)["run"]
    config, store = opened(copy)
    assert (reading["steps"], reading["epochs"], reading["by"]) == (run_steps(config), 2, "tokens")
    assert reading["filled_up"] == reading["sequences"] - sequences_of_epochs(config, store)
    assert sum(source["rows"] for source in reading["sources"]) == reading["sequences"]
    assert [source["name"] for source in reading["sources"]] == list(NAMES)
    assert sum(source["share"] for source in reading["sources"]) == pytest.approx(1)
    for source, stored, passes in zip(reading["sources"], store.sources, PASSES, strict=True):
        assert source["epochs"] == pytest.approx(2 * passes, rel=0.1)
        assert source["tokens"] == round(source["epochs"] * stored.train_tokens)
        assert source["units"] == round(source["epochs"] * stored.train_documents)
    assert main(["data", "inspect", "run.toml", "data.shares=sequences"]) == 0
    printed = capsys.readouterr().out
    assert f"sequences ({100 * share(reading, 'units'):.3g} %): 2" in printed
    assert f"the last one is filled up with {reading['filled_up']} sequences of the next epoch" in printed


def share(reading, unit):
    return reading["sources"][0][unit] / sum(source[unit] for source in reading["sources"])


def test_each_source_has_its_validation_loss(finished, copy, capfd):
    """Computed once more from the exported model, and the same with two data-parallel ranks and two stages."""
    entry = evaluated(finished / "run")
    last = len(losses(finished / "run"))
    for layout in ({"dp_shard": 2, "zero": 3, "microbatch": 2}, {"pp": 2, "microbatch": 1}):
        back_to(copy / "run", last - 2 + last % 2)
        file = write_run(copy, cluster__devices_per_node=2, layout=layout, optim={"lr": 1e-2, "schedule": "constant"})
        assert main(["train", str(file)]) == 0
        again = evaluated(copy / "run")
        assert again.keys() == entry.keys()
        for key in ("eval/loss", *(f"eval/loss/{name}" for name in NAMES)):
            assert again[key] == pytest.approx(entry[key], rel=1e-3)
        assert again["eval/tokens"] == entry["eval/tokens"]
    assert f"on {NAMES[0]} {again[f'eval/loss/{NAMES[0]}']:.4f}  {NAMES[1]} " in capfd.readouterr().out
    # In this process, so after the runs, which fork it.
    _, store = opened(finished)
    sweep, model = store.sweep(32, cross_document=True), load_decoder(finished / "run" / "hf")
    expected, counts = [], []
    for start, stop in sweep.spans:
        batch = sweep.batch(start, stop - start)
        logits = model(torch.from_numpy(batch["input_ids"])).double()
        labels = torch.from_numpy(batch["labels"])
        counts.append(int((labels != -100).sum()))
        expected.append(torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).item())
    assert [entry[f"eval/loss/{name}"] for name in NAMES] == pytest.approx(expected, rel=1e-5)
    assert entry["eval/tokens"] == sum(counts)
    assert entry["eval/loss"] == pytest.approx(np.average(expected, weights=counts), rel=1e-5)


def evaluated(out):
    return [entry for entry in metrics(out) if "eval/loss" in entry][-1]
