"""Runs that train reward models: from a language model, in full and beside adapters; resumes, exports, merging."""

from __future__ import annotations

import contextlib
import json
import math
import random
import shutil
import warnings
from importlib.util import find_spec

import pytest
import torch
from safetensors.torch import load_file
from tests.train.conftest import back_to, losses, metrics, run_file

from chat_rows import message, save_tokenizer, write_rows
from kumi.cli import main
from kumi.convert import convert, load_decoder
from kumi.convert.hf.adapter_write import CONFIG, WEIGHTS
from kumi.data import Source, load_tokenizer
from kumi.data.bpe import PAD
from kumi.data.bpe import train as train_tokenizer

WORDS = ["the", "json", "value", "is", "a", "list", "of", "keys", "and", "numbers"]
IDS = torch.randint(5, 250, (3, 12), generator=torch.Generator().manual_seed(0))
STEPS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Pairs whose chosen replies have other words than the rejected ones, and a language model."""
    folder, draw = tmp_path_factory.mktemp("rewards"), random.Random(0)
    save_tokenizer(train_tokenizer([Source("{stdlib}/json/*.py")], 300, folder / "bpe"), folder / "tokenizer")

    def reply(words):
        return [message("assistant", " ".join(draw.choices(words, k=draw.randrange(4, 16))))]

    pairs = [
        {"prompt": [message("user", f"ask {number}")], "chosen": reply(WORDS[:5]), "rejected": reply(WORDS[5:])}
        for number in range(60)
    ]
    write_rows(folder / "pairs.jsonl", pairs)
    assert _train(folder, "base", objective={"kind": "simpo"}, train={"steps": 1, "out": "base"}) == 0
    return folder


def _train(folder, out, **changes):
    changes = {
        "data": {"sources": [{"path": "pairs.jsonl"}], "tokenizer": "tokenizer", "validation": 0.1, "workers": 1},
        "batch": {"seq_len": 256, "tokens_per_step": 2048},
        "objective": {"kind": "reward", "center_rewards": 0.01},
        "optim": {"lr": 1e-2, "warmup_steps": 0, "schedule": "constant"},
        "train": {"steps": STEPS, "out": out},
        "model__config__max_position_embeddings": 256,
        **changes,
    }
    if "model" in changes:
        changes.pop("model__config__max_position_embeddings")
    changes["data"]["cache"] = f"{changes['objective']['kind']}-tokens"
    with contextlib.chdir(folder):
        return main(["train", str(run_file(folder, **changes))])


def test_the_best_accuracy_of_held_out_pairs_names_the_checkpoint(folder):
    changes = {"eval": {"every": 1}, "checkpoint": {"keep": 1, "best": "eval/rewards/accuracies"}}
    objective, training = {"kind": "simpo"}, {"steps": 3, "out": "accurate"}
    assert _train(folder, "accurate", objective=objective, train=training, **changes) == 0
    lines = metrics(folder / "accurate")
    accuracies = {line["step"]: value for line in lines if (value := line.get("eval/rewards/accuracies")) is not None}
    first = min(step for step, value in accuracies.items() if value == max(accuracies.values()))
    checkpoints = folder / "accurate" / "checkpoints"
    best = {"step": first, "metric": "eval/rewards/accuracies", "value": accuracies[first]}
    assert json.loads((checkpoints / "best.json").read_text()) == best
    assert sorted(int(path.name[5:]) for path in checkpoints.glob("step_*")) == sorted({first, 3})


def _last_scores(model):
    """transformers' scores of the rows of IDS, one at a time."""
    model.config.pad_token_id = None
    with torch.no_grad():
        return torch.cat([model(ids[None]).logits for ids in IDS])[:, 0]


@pytest.fixture(scope="module")
def full(folder):
    """The output of a run that trains all parameters."""
    assert _train(folder, "full", model={"source": "base/hf"}) == 0
    return folder / "full"


def test_a_run_learns_which_reply_is_preferred(folder, full):
    first, *_, last = [entry for entry in metrics(full) if "train/loss" in entry]
    assert first["train/loss"] == pytest.approx(math.log(2), abs=0.1)
    assert last["train/loss"] < 0.8 * first["train/loss"]
    config = json.loads((full / "hf/config.json").read_text())
    assert config["architectures"] == ["LlamaForSequenceClassification"]
    tokenizer = load_tokenizer(full / "hf")
    assert config["pad_token_id"] == tokenizer.encode(PAD)[0] != tokenizer.eos_id
    import transformers

    model = transformers.AutoModelForSequenceClassification.from_pretrained(full / "hf").eval()
    with torch.no_grad():
        ours = load_decoder(full / "hf")(IDS)[:, -1]
    assert (ours - _last_scores(model)).abs().max() <= 1e-5
    assert "lm_head.weight" not in load_file(full / "hf/model.safetensors")


def _same_export(ours, theirs):
    """Whether two folders have the same files, but for the lines of the card that say how it was verified."""
    files = [{path.name: path.read_bytes() for path in folder.iterdir()} for folder in (ours, theirs)]
    for each in files:
        lines = each.pop("README.md").decode().splitlines()
        each["card"] = [line for line in lines if not line.startswith(("| verified |", "| SHA-256"))]
    return files[0] == files[1]


def test_a_reward_model_is_exported_as_at_its_end(folder, full, tmp_path, monkeypatch):
    monkeypatch.chdir(folder)  # data.cache is relative
    assert main(["convert", "full", str(tmp_path / "out"), "--verify"]) == 0
    assert _same_export(tmp_path / "out", full / "hf")
    card = (tmp_path / "out/README.md").read_text()
    assert "| data | loss (mean of pairs) | rewards/chosen |" in card
    assert "AutoModelForSequenceClassification" in card


def test_a_resumed_run_is_the_same_run(folder, full, tmp_path, capfd):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    back_to(tmp_path / "full", 2)
    assert _train(tmp_path, "full", model={"source": "base/hf"}) == 0
    assert losses(tmp_path / "full") == losses(full)
    before, after = (load_file(where / "hf/model.safetensors") for where in (full, tmp_path / "full"))
    assert all(tensor.equal(after[name]) for name, tensor in before.items())
    printed = " ".join(capfd.readouterr().out.split())
    assert "score.weight (1, 32) is the head, in place of that of LlamaForCausalLM: it is new" in printed


def test_a_reward_model_is_trained_on_and_not_as_a_language_model(folder, full, capfd):
    assert _train(folder, "more", model={"source": "full/hf"}, train={"steps": 1, "out": "more"}) == 0
    # The first loss is that of the trained head.
    assert losses(folder / "more")[1] < 0.9 * losses(full)[1]
    capfd.readouterr()
    assert _train(folder, "lm", model={"source": "full/hf"}, objective={"kind": "simpo"}) == 2
    assert "objective.kind='simpo' needs a language model, but LlamaForSequenceClassification has a score head" in (
        capfd.readouterr().err
    )


def test_the_head_is_trained_beside_adapters_as_in_peft(folder):
    lora = {"r": 4, "alpha": 8.0, "merge": True}
    assert _train(folder, "adapted", model={"source": "base/hf"}, lora=lora) == 0
    out = folder / "adapted"
    config, tensors = json.loads((out / "adapter" / CONFIG).read_text()), load_file(out / "adapter" / WEIGHTS)
    assert (config["task_type"], config["modules_to_save"]) == ("SEQ_CLS", ["score"])
    assert tensors["base_model.model.score.weight"].shape == (1, 32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import peft
        import transformers

        base = transformers.AutoModelForSequenceClassification.from_pretrained(folder / "base/hf", num_labels=1)
        model = peft.PeftModel.from_pretrained(base, out / "adapter").eval()
    theirs = _last_scores(model)
    with torch.no_grad():
        merged, apart = (load_decoder(out / name)(IDS)[:, -1] for name in ("hf", "adapter"))
    assert (merged - theirs).abs().max() <= 1e-5
    assert (apart - theirs).abs().max() <= 1e-5
    with contextlib.chdir(folder):
        for words, target in (([], "adapter"), (["--to", "hf"], "hf")):
            assert main(["convert", "adapted", f"converted-{target}", "--verify", *words]) == 0
            assert _same_export(folder / f"converted-{target}", out / target)
    with contextlib.chdir(folder):
        convert(out / f"checkpoints/step_{STEPS:06d}", out / "from_checkpoint", to="hf")
    again = load_file(out / "from_checkpoint/model.safetensors")
    assert all(tensor.equal(again[name]) for name, tensor in load_file(out / "hf/model.safetensors").items())
    # A resumed run and a run that continues from the adapters have the head, too.
    expected = losses(out)
    back_to(out, 2)
    shutil.rmtree(out / "adapter")
    assert _train(folder, "adapted", model={"source": "base/hf"}, lora=lora) == 0
    assert losses(out) == expected
    more = {**lora, "source": "adapted/adapter", "merge": False}
    train = {"steps": 1, "out": "adapted_more"}
    assert _train(folder, "adapted_more", model={"source": "base/hf"}, lora=more, train=train) == 0
    assert losses(folder / "adapted_more")[1] < 0.95 * expected[1]


@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed")
def test_the_head_is_trained_beside_four_bit_matrices(folder):
    """As beside matrices in full: four bits round the frozen ones only, and the folder is PEFT's."""
    lora = {"r": 4, "alpha": 8.0}
    for name, changes in (("plain", {}), ("packed", {"quantize": "nf4"})):
        train = {"steps": STEPS, "out": name}
        assert _train(folder, name, model={"source": "base/hf"}, lora={**lora, **changes}, train=train) == 0
    plain, packed = losses(folder / "plain"), losses(folder / "packed")
    assert packed != plain
    assert list(packed.values()) == pytest.approx(list(plain.values()), rel=0.1)
    assert packed[STEPS] < 0.95 * packed[1]
    heads = [
        load_file(folder / name / "adapter" / WEIGHTS)["base_model.model.score.weight"] for name in ("plain", "packed")
    ]
    assert (heads[0] - heads[1]).norm() < 0.5 * heads[0].norm()
