import contextlib
import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.train.conftest import back_to, losses, metrics, run_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import kumi
from kumi.cli import main
from kumi.storage import checkpoint
from kumi.train import loop
from kumi.train.callbacks import Callbacks
from kumi.train.train_state import TrainState


def train(folder, *overrides, **changes):
    with contextlib.chdir(folder):
        return main(["train", str(run_file(folder, **changes)), *overrides])


def test_a_run_leaves_what_it_promised(small):
    out = small.folder / "run"
    entries = metrics(out)
    assert [entry["step"] for entry in entries if "train/loss" in entry] == [1, 2, 3, 4, 5, 6]
    assert entries[0]["train/loss"] == pytest.approx(math.log(320), rel=0.05)
    assert entries[5]["train/loss"] < entries[0]["train/loss"] - 0.5
    assert [entry["step"] for entry in entries if "eval/loss" in entry] == [6]
    # Six steps of 256 tokens in sequences of 32; ends of documents have no label, so fewer are trained.
    meta = checkpoint.open(out / "checkpoints" / "step_000006").meta
    assert meta["sequences"] == 6 * 256 / 32
    assert 0.8 * 6 * 256 < meta["tokens"] < 6 * 256
    assert [folder.name for folder in checkpoint.list_complete(out / "checkpoints")] == [
        "step_000002",
        "step_000004",
        "step_000006",
    ]
    assert not (out / "checkpoints" / "drill").exists()
    assert (out / "config.toml").exists()


def test_a_drill_that_was_left_behind_is_in_nobodys_way(small, tmp_path, monkeypatch):
    """A run that is killed between saving and removing the preflight checkpoint leaves one."""
    monkeypatch.chdir(small.copy(tmp_path / "work"))
    checkpoints = Path("run/checkpoints")
    shutil.copytree(checkpoints / "step_000002", checkpoints / "drill" / "step_000002")
    back_to("run", 2)
    assert main(["train", "run.toml"]) == 0
    assert not (checkpoints / "drill").exists()
    assert len(losses("run")) == 6


def test_the_exported_folder_is_the_trained_model(small):
    out = small.folder / "run"
    ours, theirs = kumi.load_decoder(out / "hf"), AutoModelForCausalLM.from_pretrained(out / "hf")
    tokenizer = AutoTokenizer.from_pretrained(out / "hf")
    input_ids = torch.tensor([tokenizer("the model learns").input_ids])
    assert torch.allclose(ours(input_ids), theirs(input_ids).logits, atol=1e-5)
    saved = checkpoint.open(out / "checkpoints" / "step_000006")
    for name, parameter in theirs.named_parameters():
        assert torch.equal(parameter, saved.read(f"model/{name}"))


def test_the_tokenizer_decodes_what_it_encodes(small):
    tokenizer = AutoTokenizer.from_pretrained(small.folder / "run" / "hf")
    assert tokenizer.decode(tokenizer("the model learns fast").input_ids) == "the model learns fast"


def test_a_finished_run_is_left_alone(small, tmp_path, capsys):
    folder = small.copy(tmp_path)
    assert train(folder) == 0
    before = (folder / "run" / "hf" / "model.safetensors").stat().st_mtime_ns
    capsys.readouterr()
    assert train(folder) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert (folder / "run" / "hf" / "model.safetensors").stat().st_mtime_ns == before


@pytest.mark.parametrize("step", [2, 4])
def test_resuming_gives_the_very_same_losses_and_weights(small, tmp_path, step):
    folder = small.copy(tmp_path)
    back_to(folder / "run", step)
    shutil.rmtree(folder / "tokens")  # the tokens come back the same, too
    assert train(folder) == 0
    assert losses(folder / "run") == losses(small.folder / "run")
    resumed, two = (checkpoint.open(root / "run" / "checkpoints" / "step_000006") for root in (folder, small.folder))
    assert set(resumed.tensors) == set(two.tensors)
    for name in resumed.tensors:
        assert torch.equal(resumed.read(name), two.read(name)), name


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({"zero": 0}, marks=pytest.mark.exhaustive, id="ddp"),
        pytest.param({"zero": 3, "recompute": "full"}, id="zero3-full"),
        pytest.param({"zero": 1, "microbatch": 1}, marks=pytest.mark.exhaustive, id="zero1-micro1"),
        pytest.param({"tp": 2}, id="tp2"),
    ],
)
def test_training_goes_on_under_another_layout(small, tmp_path, layout):
    folder = small.copy(tmp_path)
    back_to(folder / "run", 4)
    assert train(folder, cluster__devices_per_node=2, layout=layout) == 0
    assert losses(folder / "run") == pytest.approx(losses(small.folder / "run"), rel=1e-5)
    mine, alone = (
        checkpoint.open(root / "run" / "checkpoints" / "step_000006").meta for root in (folder, small.folder)
    )
    assert [mine[key] for key in ("tokens", "sequences")] == [alone[key] for key in ("tokens", "sequences")]
    mine, alone = (metrics(root / "run")[-1] for root in (folder, small.folder))
    assert mine["eval/loss"] == pytest.approx(alone["eval/loss"], rel=1e-5)
    assert mine["eval/tokens"] == alone["eval/tokens"]


def test_a_run_under_another_layout_from_the_start_learns_the_same(small, tmp_path):
    folder = small.copy(tmp_path)
    shutil.rmtree(folder / "run")
    assert train(folder, cluster__devices_per_node=2, layout={"zero": 2}, precision={"kind": "fp32"}) == 0
    assert losses(folder / "run") == pytest.approx(losses(small.folder / "run"), rel=1e-4)


@pytest.mark.parametrize("kind", ["bf16", "fp16", "fp64"])
def test_other_precisions_learn_nearly_the_same(small, tmp_path, kind):
    folder = small.copy(tmp_path)
    shutil.rmtree(folder / "run")
    assert train(folder, precision={"kind": kind}) == 0
    # float16 leaves out its first steps, until the loss scale has come down to where gradients do not overflow.
    assert losses(folder / "run") == pytest.approx(losses(small.folder / "run"), rel=0.2 if kind == "fp16" else 2e-2)


def test_fine_tuning_starts_from_a_folder_s_weights(small, tmp_path):
    folder = small.copy(tmp_path)
    last = losses(folder / "run")[6]
    shutil.copytree(folder / "run" / "hf", folder / "base")
    shutil.rmtree(folder / "run")
    data = {"tokenizer": "base", "sources": [{"path": "documents.jsonl"}], "workers": 1}
    assert train(folder, model={"source": "base"}, data=data, optim={"lr": 1e-4}) == 0
    assert losses(folder / "run")[1] < last + 0.5
    assert (folder / "run" / "hf" / "tokenizer.json").read_bytes() == (folder / "base" / "tokenizer.json").read_bytes()


def test_a_loss_that_is_not_finite_stops_the_run(small, tmp_path, capsys):
    folder = small.copy(tmp_path)
    shutil.rmtree(folder / "run")
    assert train(folder, optim={"lr": 1e30, "grad_clip": 0.0}) == 6
    error = capsys.readouterr().err
    assert "DivergedError: step" in error
    # The command in the error runs: with half of such a rate the loss is not finite either.
    _, _, remedy = error.rpartition("kumi ")
    with contextlib.chdir(folder):
        assert main([word.replace("RUN.toml", "run.toml") for word in remedy.split()]) == 6


def test_tensorboard_gets_the_metrics(small, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = small.copy(tmp_path)
    back_to(folder / "run", 4)
    assert train(folder, log={"trackers": ["tensorboard", "trackio"], "every": 1}) == 0
    events = EventAccumulator(str(folder / "run" / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [5, 6]
    assert events.Scalars("train/loss")[0].value == pytest.approx(losses(folder / "run")[5])


def test_a_step_is_saved_once_whatever_the_disk_shows(monkeypatch, tmp_path):
    """A signal may come while a checkpoint of the same step is being written: all ranks must decide the same."""
    saved = []
    saver = SimpleNamespace(save=lambda folder, *_, **__: saved.append(folder.name), wait=lambda: None)
    parts = SimpleNamespace(run=SimpleNamespace(config=SimpleNamespace(checkpoint=SimpleNamespace(keep=1))), store=None)
    monkeypatch.setattr(loop, "checkpoint_pieces", lambda parts: [])
    monkeypatch.setattr(loop, "checkpoint_meta", lambda *_: {})
    state = TrainState(step=6)
    heard = Callbacks(
        SimpleNamespace(train=SimpleNamespace(steps=6)), [SimpleNamespace(on_save=lambda *_: saved.append("told"))]
    )
    loop._save(parts, state, saver, tmp_path, heard, wait=False)
    loop._save(parts, state, saver, tmp_path, heard, wait=True)
    assert saved == ["step_000006", "told"]
