"""A relative path that leads nowhere: the error says from which folder it was looked for, whoever takes the path."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kumi.cli import main
from kumi.convert.hf.adapter_read import adapters_reader
from kumi.data.binfile import open_file
from kumi.errors import KumiError
from kumi.paths import shown_path
from kumi.spec import families
from kumi.storage import checkpoint

EXAMPLES = Path(__file__).parents[1] / "examples"
QUICKSTART, PLANNED, LORA = (str(EXAMPLES / name) for name in ("quickstart.toml", "plan/llama-3-8b.toml", "lora.toml"))
MODEL = str(EXAMPLES / "models" / "llama-3-8b")
PLAN = ["plan", PLANNED, f"model.source={MODEL}"]


@pytest.mark.parametrize(
    "words",
    [
        ["describe", "nowhere"],
        ["plan", "nowhere"],
        ["train", "nowhere"],
        ["plan", "no/where", "--gpus", "8xh100-sxm"],
        ["plan", MODEL, "--gpus", "8xnowhere.toml"],
        ["plan", PLANNED, "model.source=nowhere"],
        ["plan", PLANNED, "model.source=no/where"],
        [*PLAN, "cluster.source=nowhere.toml"],
        [*PLAN, "cluster.network=nowhere.toml"],
        [*PLAN, "cluster.sites=2", "cluster.site_link=nowhere.toml"],
        [*PLAN, "--calibrate", "nowhere", "--out", "new.toml"],
        ["describe", LORA, "model.source=nowhere"],
        ["data", "prepare", QUICKSTART, "data.tokenizer=nowhere"],
        ["data", "prepare", QUICKSTART, "data.tokenizer=no/where"],
        ["data", "prepare", QUICKSTART, "data.sources=[{path='nowhere/*.txt'}]"],
        ["convert", "nowhere", "new", "--to", "hf"],
        ["convert", "no/where", "new", "--to", "hf"],
        ["vocab", "extend", "nowhere", "new", "--add", "tokens.txt"],
        ["vocab", "extend", "BASE", "new", "--add", "nowhere"],
        ["vocab", "extend", "BASE", "new", "--special", "nowhere"],
        ["vocab", "extend", "BASE", "new", "--learn", "9", "--data", "nowhere"],
        ["push", "nowhere", "org/name"],
    ],
    ids=" ".join,
)
def test_the_command_line_says_from_where(words, base, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main([str(base) if word == "BASE" else word for word in words]) == 2
    error = capsys.readouterr().err
    assert f"(looked for from {tmp_path})" in error
    assert error.count("\n") == 1
    assert not (tmp_path / "new").exists()


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A tiny model with a tokenizer, as transformers writes it."""
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("base")
    sizes = {
        "vocab_size": 16,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 16,
    }
    LlamaForCausalLM(LlamaConfig(**sizes)).save_pretrained(folder)
    Tokenizer(models.BPE({chr(97 + index): index for index in range(16)}, [])).save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize("name", ["lora.source", "indexed data", "checkpoint"])
def test_readers_say_from_where(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    spec = families.from_hf(json.loads((EXAMPLES / "models/llama-3-8b/config.json").read_text()))
    readers = {
        "lora.source": lambda: adapters_reader(Path("nowhere"), spec),
        "indexed data": lambda: open_file("a/b"),
        "checkpoint": lambda: checkpoint.open("nowhere"),
    }
    with pytest.raises(KumiError, match=f"looked for from {tmp_path}"):
        readers[name]()


def test_absolute_paths_need_no_folder():
    assert shown_path("/x/y") == "/x/y"
    assert shown_path("~/y") == "~/y"


def test_a_run_without_a_readable_checkpoint_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("hf", "checkpoints/step_000002", "checkpoints/step_000004"):
        (tmp_path / "run" / name).mkdir(parents=True)
    assert main(["convert", "run", "new", "--to", "hf"]) == 2
    error = capsys.readouterr().err
    assert "run/checkpoints/step_000004/index.json" in error
    assert "no checkpoint of the run can be read" in error
