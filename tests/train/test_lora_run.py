"""Runs that train adapters save only these, continue with the same results, and verify their exports."""

from __future__ import annotations

import contextlib
import json
import shutil
import warnings
from importlib.util import find_spec

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.train.conftest import back_to, losses, run_file

from kumi.cli import main
from kumi.convert.base_digest import base_digest
from kumi.convert.hf.adapter_write import CONFIG, WEIGHTS
from kumi.convert.hf.card import check_verified
from kumi.convert.load_weights import load_decoder
from kumi.errors import ModelError
from kumi.storage import checkpoint
from kumi.train import export_run as export_run_module
from kumi.train.run_folder import RUN_FILES

SOME = {"r": 4, "alpha": 8.0, "target_modules": ["q_proj", "v_proj", "down_proj"], "dropout": 0.1}


def adapters(folder, **changes):
    """A run file that trains adapters of the model that the small run has exported."""
    lora = changes.pop("lora", {})
    model = {"source": "run/hf"}
    return run_file(
        folder,
        model=model,
        train={"steps": 6, "out": "adapted"},
        lora=SOME | lora,
        sample={"prompts": ["the model"], "max_new_tokens": 3},
        **changes,
    )


@pytest.fixture(scope="module")
def run(small, tmp_path_factory):
    """A folder in which adapters have been trained, merged, too."""
    folder = small.copy(tmp_path_factory.mktemp("adapted"))
    with contextlib.chdir(folder):
        assert main(["train", str(adapters(folder, lora={"merge": True}))]) == 0
    return folder


def _logits(decoder):
    with torch.no_grad():
        return decoder(torch.arange(40).view(2, 20))


def test_only_adapters_are_trained_and_saved(run):
    saved = checkpoint.open(run / "adapted/checkpoints/step_000006")
    assert all(".lora_" in name for name in saved.tensors)
    assert len([name for name in saved.tensors if name.startswith("model/")]) == 2 * 3 * 2
    assert saved.meta["base_digest"] == base_digest(run / "run/hf")
    assert {path.name for path in (run / "adapted").iterdir()} <= set(RUN_FILES)
    curve = losses(run / "adapted")
    assert curve[6] < curve[1]
    assert curve[1] == pytest.approx(losses(run / "run")[6], rel=0.2)


def test_peft_loads_it_and_the_merged_model_is_the_same(run):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import peft
        import transformers

        base = transformers.AutoModelForCausalLM.from_pretrained(run / "run/hf")
        model = peft.PeftModel.from_pretrained(base, run / "adapted/adapter").eval()
    with torch.no_grad():
        theirs = model(torch.arange(40).view(2, 20)).logits
    ours, before = _logits(load_decoder(run / "adapted/hf")), _logits(load_decoder(run / "run/hf"))
    assert (ours - theirs).abs().max() < 1e-4
    assert (ours - before).abs().max() > 1e-2
    assert (run / "adapted/hf/tokenizer.json").exists()
    card = (run / "adapted/adapter/README.md").read_text()
    assert "LoRA adapters of small, written by" in card  # the title of the base model's card
    assert str(run) not in card
    assert "| all |" in card


def test_a_continued_run_is_the_same_run(run, tmp_path):
    shutil.copytree(run, tmp_path, dirs_exist_ok=True)
    expected = losses(run / "adapted")
    back_to(tmp_path / "adapted", 2)
    with contextlib.chdir(tmp_path):
        assert main(["train", str(adapters(tmp_path, lora={"merge": True}))]) == 0
    assert losses(tmp_path / "adapted") == expected
    before, after = (load_file(where / "adapted/adapter" / WEIGHTS) for where in (run, tmp_path))
    assert before.keys() == after.keys()
    assert all(before[name].equal(after[name]) for name in before)


def test_checkpoints_and_folders_of_adapters_are_merged_on_the_command_line(run, tmp_path, capsys):
    with contextlib.chdir(run):
        for number, source in enumerate(("adapted/checkpoints/step_000006", "adapted/adapter")):
            assert main(["convert", source, str(tmp_path / str(number)), "--to", "hf", "--verify"]) == 0
        assert main(["convert", "adapted/adapter", str(tmp_path / "kumi"), "--to", "kumi", "--base", "run/hf"]) == 0
    assert "with unmerged adapters" in capsys.readouterr().out
    expected = load_file(run / "adapted/hf/model.safetensors")
    for number in range(2):
        merged = load_file(tmp_path / str(number) / "model.safetensors")
        assert all(merged[name].equal(expected[name]) for name in expected)


def _card(folder):
    """The lines of a card, but for those that say how it was verified."""
    lines = (folder / "README.md").read_text().splitlines()
    return [line for line in lines if not line.startswith(("| verified |", "| SHA-256"))]


def _content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "README.md"}


def test_a_run_of_adapters_is_exported_as_at_its_end(run, tmp_path, capsys):
    with contextlib.chdir(run):
        assert main(["convert", "adapted", str(tmp_path / "adapter"), "--verify", "--json"]) == 0
        result = json.loads(capsys.readouterr().out)
        assert (result["to"], result["verified"]) == ("adapter", True)
        assert "verified: logits within 0.0e+00 of the checkpoint's" in result["message"]
        assert main(["convert", "adapted", str(tmp_path / "merged"), "--to", "hf"]) == 0
        assert main(["convert", "adapted", str(tmp_path / "two"), "--checkpoint", "2"]) == 0
        assert main(["convert", "adapted", str(tmp_path / "no"), "--dtype", "bfloat16"]) == 2
    assert "--dtype, --layout and Megatron's flags have no effect on adapters" in capsys.readouterr().err
    for ours, theirs in (("adapter", "adapter"), ("merged", "hf")):
        assert _content(tmp_path / ours) == _content(run / "adapted" / theirs)
        assert _card(tmp_path / ours) == _card(run / "adapted" / theirs)
    check_verified(tmp_path / "adapter")
    assert _content(tmp_path / "two")[CONFIG] == _content(tmp_path / "adapter")[CONFIG]
    assert _content(tmp_path / "two")[WEIGHTS] != _content(tmp_path / "adapter")[WEIGHTS]
    assert "| steps | 2 |" in (tmp_path / "two/README.md").read_text()


def test_adapters_that_differ_from_the_checkpoint_are_removed(run, tmp_path, monkeypatch):
    write = export_run_module.write_run_adapters

    def written_wrongly(folder, *arguments):
        write(folder, *arguments)
        tensors = load_file(folder / WEIGHTS)
        save_file({name: 2 * value for name, value in tensors.items()}, folder / WEIGHTS)

    monkeypatch.setattr(export_run_module, "write_run_adapters", written_wrongly)
    with pytest.raises(ModelError, match=r"logits differ by .* from those of the adapters in"):
        export_run_module.export_run(run / "adapted", tmp_path / "out", base=str(run / "run/hf"))
    assert not (tmp_path / "out").exists()


def test_adapters_go_on_from_adapters(run, tmp_path):
    shutil.copytree(run, tmp_path, dirs_exist_ok=True)
    more = adapters(tmp_path, lora={"source": "adapted/adapter"})
    with contextlib.chdir(tmp_path):
        assert main(["train", str(more), "train.out=more", "optim.lr=1e-4", "optim.warmup_steps=0"]) == 0
        first = losses("more")[1]
        assert first < 0.5 * (losses("adapted")[1] + losses("adapted")[6])
        assert main(["train", str(more), "train.out=other", "lora.r=3"]) == 2


def test_another_base_is_refused(run, tmp_path, capsys):
    shutil.copytree(run, tmp_path, dirs_exist_ok=True)
    back_to(tmp_path / "adapted", 2)
    weights = load_file(tmp_path / "run/hf/model.safetensors")
    save_file({name: value + 1 for name, value in weights.items()}, tmp_path / "run/hf/model.safetensors")
    with contextlib.chdir(tmp_path):
        assert main(["train", str(adapters(tmp_path, lora={"merge": True}))]) == 2
        assert "has adapters of the base model that was in" in capsys.readouterr().err
        assert main(["convert", "adapted/checkpoints/step_000002", "out", "--to", "hf", "--base", "run/hf"]) == 2
        assert "were trained on another model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["lora.target_modules=['q_prj']"], "did you mean 'q_proj'?"),
        (["lora.r=0"], "lora.r"),
        (["lora.rank=4"], "lora.rank"),
        (["model.init=random"], "but model.init='random'"),
        (["layout.tiles=2"], "which needs undivided matrices"),
        (["lora.source=nowhere"], "has no adapter_config.json"),
        (["train.compile=true"], "compiled layers have neither dropout nor dequantisation"),
        (["model.balance=aux"], "model.balance"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(run, tmp_path, capsys, words, message):
    file = adapters(tmp_path)
    shutil.copytree(run / "run/hf", tmp_path / "run/hf")
    shutil.copy(run / "documents.jsonl", tmp_path)
    with contextlib.chdir(tmp_path):
        assert main(["train", str(file), *words]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "adapted").exists()


@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
@pytest.mark.parametrize("dora", [False, True])
def test_frozen_matrices_in_four_bits(run, tmp_path, dora):
    shutil.copytree(run, tmp_path, dirs_exist_ok=True)
    file = adapters(tmp_path, lora={"quantize": "nf4", "use_dora": dora})
    with contextlib.chdir(tmp_path):
        assert main(["train", str(file), "train.out=packed", "precision.kind=fp32"]) == 0
    plain, quantized = losses(run / "adapted"), losses(tmp_path / "packed")
    assert quantized != plain
    assert list(quantized.values()) == pytest.approx(list(plain.values()), rel=0.01)
    assert all(value.any() for value in load_file(tmp_path / "packed/adapter" / WEIGHTS).values())
    assert json.loads((tmp_path / "packed/adapter" / CONFIG).read_text())["use_dora"] is dora


@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
def test_a_run_on_sharded_four_bits_continues_on_one_rank_and_is_merged(run, tmp_path):
    shutil.copytree(run, tmp_path, dirs_exist_ok=True)
    # Dropout masks differ between layouts.
    file = adapters(tmp_path, lora={"quantize": "nf4", "dropout": 0.0, "merge": True})
    sharded = ["cluster.devices_per_node=2", "layout.zero=3", "layout.dp_shard=2"]
    with contextlib.chdir(tmp_path):
        assert main(["train", str(file), "train.out=alone"]) == 0
        assert main(["train", str(file), "train.out=moved", *sharded]) == 0
        expected = losses("alone")
        assert losses("moved") == pytest.approx(expected, rel=1e-5)
        back_to("moved", 2)
        assert main(["train", str(file), "train.out=moved"]) == 0
        assert losses("moved") == pytest.approx(expected, rel=1e-5)
        merged, before = (load_file(f"{folder}/hf/model.safetensors") for folder in ("moved", "run"))
    changed = {name for name in before if not merged[name].equal(before[name])}
    assert {name.split(".")[-2] for name in changed} == {"q_proj", "v_proj", "down_proj"}
