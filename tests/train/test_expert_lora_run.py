"""Runs that train adapters of experts, modules in full and noisy embeddings: checkpoints, resumes, exports, merging."""

from __future__ import annotations

import contextlib
import json
import shutil
import warnings

import pytest
import torch
from safetensors.torch import load_file
from tests.train.conftest import back_to, losses, run_file

from kumi.cli import main
from kumi.convert.hf.adapter_write import CONFIG, WEIGHTS
from kumi.convert.load_weights import load_decoder
from kumi.storage import checkpoint

MIXTRAL = {
    "model_type": "mixtral",
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
}
LORA = {"r": 4, "target_modules": ["q_proj", "experts"], "modules_to_save": ["lm_head", "norm"], "merge": True}


def _adapters(folder, **changes):
    return run_file(
        folder,
        model={"source": "run/hf"},
        train={"steps": 4, "out": "adapted", "neftune_alpha": 5.0},
        lora=LORA | changes.pop("lora", {}),
        **changes,
    )


@pytest.fixture(scope="module")
def run(small, tmp_path_factory):
    """A folder in which adapters of a small Mixtral have been trained and merged."""
    folder = tmp_path_factory.mktemp("experts")
    shutil.copy(small.folder / "documents.jsonl", folder)
    with contextlib.chdir(folder):
        base = run_file(folder, model={"init": "random", "config": MIXTRAL}, train={"steps": 4, "out": "run"})
        assert main(["train", str(base)]) == 0
        assert main(["train", str(_adapters(folder))]) == 0
    return folder


def test_trained_tensors_are_saved_exported_and_merged(run):
    saved = checkpoint.open(run / "adapted/checkpoints/step_000004")
    model = {name.removeprefix("model/") for name in saved.tensors if name.startswith("model/")}
    assert {name for name in model if "lora" not in name} == {"lm_head.weight", "model.norm.weight"}
    assert len([name for name in model if ".experts." in name]) == 2 * 2 * 2
    assert {name.rpartition("/")[0].removeprefix("optim/") for name in saved.tensors if "optim/" in name} == model
    exported = load_file(run / "adapted/adapter" / WEIGHTS)
    assert exported["base_model.model.lm_head.weight"].equal(saved.read("model/lm_head.weight"))
    config = json.loads((run / "adapted/adapter" / CONFIG).read_text())
    assert config["modules_to_save"] == ["lm_head", "model.norm"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import peft
        import transformers

        base = transformers.AutoModelForCausalLM.from_pretrained(run / "run/hf")
        model = peft.PeftModel.from_pretrained(base, run / "adapted/adapter").eval()
    ids = torch.arange(40).view(2, 20)
    with torch.no_grad():
        theirs, ours = model(ids).logits, load_decoder(run / "adapted/hf")(ids)
        before = load_decoder(run / "run/hf")(ids)
    assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()
    assert (ours - before).abs().max() > 1e-2


def test_a_continued_run_is_the_same_run_and_noise_is_in_it(run, tmp_path):
    shutil.copytree(run, tmp_path, dirs_exist_ok=True)
    expected = losses(run / "adapted")
    back_to(tmp_path / "adapted", 2)
    with contextlib.chdir(tmp_path):
        assert main(["train", str(_adapters(tmp_path))]) == 0
        assert losses("adapted") == expected
        before, after = (load_file(where / "adapted/adapter" / WEIGHTS) for where in (run, tmp_path))
        assert before.keys() == after.keys()
        assert all(before[name].equal(after[name]) for name in before)
        # Without noise, the loss of the first step differs already.
        plain = ["train.out=plain", "train.neftune_alpha=0", "train.steps=1", "optim.warmup_steps=0"]
        assert main(["train", str(_adapters(tmp_path)), *plain]) == 0
        assert abs(losses("plain")[1] - expected[1]) > 1e-5


def test_adapters_and_modules_go_on_from_a_folder(run, tmp_path, capsys):
    shutil.copytree(run, tmp_path, dirs_exist_ok=True)
    more = _adapters(tmp_path, lora={"source": "adapted/adapter", "merge": False})
    steps = ["train.steps=1", "optim.lr=1e-9", "optim.warmup_steps=0", "train.neftune_alpha=0"]
    with contextlib.chdir(tmp_path):
        assert main(["train", str(more), "train.out=more", *steps]) == 0
        old, new = (load_file(f"{out}/adapter/{WEIGHTS}") for out in ("adapted", "more"))
        for name, tensor in old.items():
            torch.testing.assert_close(new[name], tensor, atol=1e-6, rtol=0)
        assert main(["train", str(more), "train.out=other", "lora.modules_to_save=['norm']"]) == 2
    assert "lora.modules_to_save disagree about lm_head.weight" in capsys.readouterr().err


@pytest.mark.parametrize(
    "layout",
    [
        {"dp_shard": 2, "ep": 2, "zero": 3},
        pytest.param({"tp": 2, "expert_tp": 2}, marks=pytest.mark.exhaustive),
        pytest.param({"pp": 2}, marks=pytest.mark.exhaustive),
    ],
    ids=["zero-ep", "expert_tp", "pp"],
)
def test_ranks_resume_bitwise_and_another_layout_goes_on(run, tmp_path, layout):
    shutil.copytree(run, tmp_path, dirs_exist_ok=True)
    file = _adapters(tmp_path, layout=layout, cluster={"devices_per_node": 2}, lora={"merge": False})
    with contextlib.chdir(tmp_path):
        assert main(["train", str(file), "train.out=split"]) == 0
        expected, weights = losses("split"), load_file("split/adapter/" + WEIGHTS)
        # The layout changes the order of sums only; noise is the same.
        assert list(expected.values()) == pytest.approx(list(losses("adapted").values()), rel=1e-5)
        back_to("split", 2)
        shutil.rmtree("split/adapter")
        shutil.copytree("split", "other")
        assert main(["train", str(file), "train.out=split"]) == 0
        assert losses("split") == expected
        again = load_file("split/adapter/" + WEIGHTS)
        assert all(again[name].equal(weights[name]) for name in weights)
        single = _adapters(tmp_path, lora={"merge": False})
        assert main(["train", str(single), "train.out=other"]) == 0
        assert losses("other")[4] == pytest.approx(expected[4], rel=1e-5)


def test_modules_in_full_cannot_be_left_out_for_a_reference(run, tmp_path, capsys):
    words = ["objective.kind='dpo'", "reference.kind='adapters-off'", "train.out=never"]
    with contextlib.chdir(run):
        assert main(["train", str(_adapters(tmp_path)), *words]) == 2
    assert "modules that are trained in full cannot be left out" in capsys.readouterr().err
