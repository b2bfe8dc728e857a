"""Models that are planned for but not trained: no verb builds, trains or converts them."""

import contextlib
import json
from pathlib import Path

import pytest
from tests.train.conftest import run_file

from kumi.cli import main
from kumi.convert import load_decoder
from kumi.errors import ModelError

PHI3 = {"model_type": "phi3", "vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
        "original_max_position_embeddings": 64}  # fmt: skip
SENTENCE = "a phi3 model can be planned for but not trained: this version trains llama, mistral, qwen2, qwen3"


def test_train_refuses_before_it_writes_anything(tmp_path, capfd):
    (tmp_path / "documents.jsonl").write_text(json.dumps({"text": "words and more words"}) + "\n")
    run = run_file(tmp_path, model={"init": "random", "config": PHI3})
    before = sorted(tmp_path.iterdir())
    with contextlib.chdir(tmp_path):
        assert main(["train", str(run)]) == 2
        assert SENTENCE in capfd.readouterr().err
        assert sorted(tmp_path.iterdir()) == before
        assert main(["describe", str(run)]) == 0


def test_conversion_and_loading_refuse(tmp_path, capfd):
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    Path(source / "config.json").write_text(json.dumps(PHI3))
    assert main(["convert", str(source), str(target), "--to", "kumi"]) == 2
    assert SENTENCE in capfd.readouterr().err
    assert not target.exists()
    with pytest.raises(ModelError, match=SENTENCE):
        load_decoder(source)
