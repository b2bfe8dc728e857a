"""Models to generate with, from every kind of folder."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path

import pytest
import torch

from kumi.convert import convert
from kumi.errors import ConfigError, ModelError, RefusedError
from kumi.inference.load_model import load_model
from text_models import CHAT, write_chat_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A Hugging Face folder of a tiny model in bfloat16, with the tokenizer of examples/chat; tests only read it."""
    return write_chat_model(tmp_path_factory.mktemp("model") / "tiny", torch.bfloat16)


@pytest.fixture(scope="module")
def checkpoint(folder, tmp_path_factory) -> Path:
    target = tmp_path_factory.mktemp("run") / "run" / "checkpoints" / "step_000010"
    target.parent.mkdir(parents=True)
    convert(folder, target, to="kumi", verify=False)
    return target


def _logits(model):
    with torch.no_grad():
        return model.decoder(torch.arange(12)[None]).float()


def test_a_hugging_face_folder(folder):
    model = load_model(folder)
    assert model.name == "tiny"
    assert model.chosen == ""
    assert model.decoder.head_weight.dtype == model.decoder.compute_dtype == torch.bfloat16
    assert not model.decoder.training
    assert not any(parameter.requires_grad for parameter in model.decoder.parameters())
    assert model.stop_ids == {0, 2}
    assert model.chat_template is not None
    assert load_model(folder, dtype="float64").decoder.compute_dtype == torch.float64


def test_a_folder_without_template_and_settings(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "bare")
    (copy / "chat_template.jinja").unlink()
    (copy / "generation_config.json").unlink()
    model = load_model(copy)
    assert model.chat_template is None
    assert model.stop_ids == {model.tokenizer.eos_id}


def test_a_checkpoint_and_a_run_folder(folder, checkpoint, tmp_path):
    expected = _logits(load_model(folder))
    model = load_model(checkpoint)
    assert torch.equal(_logits(model), expected)
    assert model.tokenizer.folder == folder
    run = shutil.copytree(checkpoint.parents[1], tmp_path / "run")
    shutil.copytree(checkpoint, run / "checkpoints" / "step_000020")
    model = load_model(run)
    assert model.chosen == "the last checkpoint, of step 20, because the run keeps no best one"
    assert torch.equal(_logits(model), expected)
    with pytest.raises(ConfigError, match=r"no best checkpoint.*checkpoint\.best"):
        load_model(run, checkpoint="best")
    (run / "checkpoints" / "best.json").write_text('{"step": 10, "metric": "eval/loss", "value": 1.0}')
    assert load_model(run, checkpoint="best").chosen == "the best checkpoint, of step 10"
    assert load_model(run).chosen == "the best checkpoint, of step 10, which the run keeps by checkpoint.best"
    assert load_model(run, checkpoint="last").folder == run / "checkpoints" / "step_000020"
    assert load_model(run, checkpoint=20).chosen == "the checkpoint of step 20"
    (run / "checkpoints" / "best.json").write_text('{"step": 11}')
    with pytest.raises(
        RefusedError, match=r"step 11 has no checkpoint.*choose one of step 10, step 20, last \(step 20\)"
    ):
        load_model(run, checkpoint="best")
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").mkdir()
    with pytest.raises(ConfigError, match="a run folder without a checkpoint"):
        load_model(run)
    shutil.copytree(folder, run / "hf")
    assert "the export hf" in load_model(run).chosen


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # peft asks for it
def test_adapters(folder, tmp_path):
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    adapted = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    target = tmp_path / "adapter"
    adapted.save_pretrained(target)
    model = load_model(target, dtype="float32")
    with torch.no_grad():
        expected = adapted(torch.arange(12)[None]).logits
    assert float((_logits(model) - expected).abs().max()) < 1e-5
    assert not torch.equal(_logits(model), _logits(load_model(folder, dtype="float32")))
    assert model.tokenizer.folder == folder
    # The dtype of the base model is the default, also that of the adapters.
    model = load_model(target)
    assert {parameter.dtype for parameter in model.decoder.parameters()} == {torch.bfloat16}
    assert torch.isfinite(_logits(model)).all()
    with pytest.raises(ConfigError, match="only adapters have a base model"):
        load_model(folder, base=folder)
    config = json.loads((target / "adapter_config.json").read_text())
    (target / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": "gone"}))
    with pytest.raises(ConfigError, match=r"base model gone .* is not a folder here; name its folder with --base"):
        load_model(target)
    assert load_model(target, base=folder).tokenizer.folder == folder


def test_refusals(folder, tmp_path):
    with pytest.raises(ConfigError, match="neither a folder nor a hub id"):
        load_model(tmp_path / "nothing")
    with pytest.raises(ModelError, match="neither a Hugging Face folder"):
        load_model(tmp_path)
    with pytest.raises(ConfigError, match="dtype='int8' must be one of"):
        load_model(folder, dtype="int8")
    with pytest.raises(ConfigError, match="is one model, not a run folder"):
        load_model(folder, checkpoint="best")
    copy = shutil.copytree(folder, tmp_path / "copy")
    (copy / "generation_config.json").write_text('{"eos_token_id": [2, 4096]}')
    with pytest.raises(ConfigError, match=r"eos_token_id 4096 is no id below the vocabulary of 1024"):
        load_model(copy)
    (copy / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        load_model(copy)
    reward = tmp_path / "reward"
    reward.mkdir()
    from transformers import LlamaConfig, LlamaForSequenceClassification

    config = LlamaConfig.from_pretrained(folder, num_labels=1, pad_token_id=0)
    LlamaForSequenceClassification(config).save_pretrained(reward)
    shutil.copy(CHAT / "tokenizer.json", reward)
    with pytest.raises(ModelError, match="is a reward model, whose head gives a score and no text"):
        load_model(reward)


def test_code_of_the_model_is_not_run(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "code")
    config = json.loads((copy / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling.Evil"}
    (copy / "config.json").write_text(json.dumps(config))
    (copy / "modeling.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nraise SystemExit")
    with contextlib.suppress(ModelError):  # refused is as good
        load_model(copy)
    assert not (tmp_path / "ran").exists()
