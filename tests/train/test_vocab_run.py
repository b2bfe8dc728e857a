"""Training goes on from a model with new tokens, also where tensor parallelism pads an odd vocabulary."""

import contextlib
import json
import math
import shutil

import pytest
from safetensors import safe_open
from tests.train.conftest import losses, run_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from kumi.cli import main

DOCUMENTS = [{"path": "documents.jsonl"}]


@pytest.fixture
def folder(small, tmp_path):
    """A folder with the data, the trained model `base`, and `wide`, which has an odd number of rows."""
    folder = small.copy(tmp_path)
    shutil.move(folder / "run" / "hf", folder / "base")
    shutil.rmtree(folder / "run")
    (folder / "tokens.txt").write_text("".join(f"zap{number}\n" for number in range(22)) + "the model\n")
    with contextlib.chdir(folder):
        assert main(["vocab", "extend", "base", "wide", "--add", "tokens.txt", "--verify"]) == 0
    assert rows(folder / "wide") % 2 == 1
    return folder


def rows(model):
    config = json.loads((model / "config.json").read_text())["vocab_size"]
    with safe_open(model / "model.safetensors", "pt") as file:
        sizes = {file.get_slice(name).get_shape()[0] for name in ("model.embed_tokens.weight", "lm_head.weight")}
    assert sizes == {config}
    return config


def train(folder, model, out, *overrides, sources=DOCUMENTS):
    data = {"tokenizer": model, "sources": sources, "workers": 1, "validation": 0.1, "cache": f"{out}-tokens"}
    run = run_file(
        folder,
        model={"source": model},
        data=data,
        optim={"lr": 1e-4},
        train={"steps": 2, "out": out},
        checkpoint={"every": 0},
    )
    with contextlib.chdir(folder):
        assert main(["train", str(run), *overrides]) == 0
    return losses(folder / out)


def test_the_loss_on_old_text_is_that_of_the_old_model(folder):
    """Except for the probability of the new tokens: less than if all tokens were equally likely."""
    old = [line for line in (folder / "documents.jsonl").read_text().splitlines() if "the model" not in line]
    (folder / "old.jsonl").write_text("\n".join(old) + "\n")
    sources = [{"path": "old.jsonl"}]
    before, after = (train(folder, model, f"run-{model}", sources=sources)[1] for model in ("base", "wide"))
    assert before < after < before + math.log(323 / 300)


def test_an_odd_vocabulary_is_cut_for_training_and_whole_in_the_export(folder):
    single = train(folder, "wide", "run-one")
    two = train(folder, "wide", "run-two", "cluster.devices_per_node=2", "layout.tp=2", "layout.dp_shard=1")
    assert two == pytest.approx(single, rel=1e-4)
    assert rows(folder / "run-one" / "hf") == rows(folder / "run-two" / "hf") == rows(folder / "wide")
    tokenizer = AutoTokenizer.from_pretrained(folder / "run-two" / "hf")
    assert len(tokenizer) <= AutoModelForCausalLM.from_pretrained(folder / "run-two" / "hf").config.vocab_size
    assert len(tokenizer.encode("the model")) == 1
