"""A run that goes on from a model that sees: its text is trained, its vision tower comes out as it went in."""

import contextlib
import json

import pytest
from tests.train.conftest import run_file

from kumi.cli import main
from kumi.convert.files.safetensors_read import spans_in_folder
from tiny_models import MROPE, QWEN3_VL, reference_of


@pytest.fixture
def folder(small, tmp_path):
    (tmp_path / "documents.jsonl").write_text((small.folder / "documents.jsonl").read_text())
    text = {"vocab_size": 320, "head_dim": 8, "rope_parameters": MROPE}
    reference_of("Qwen3VL", {**QWEN3_VL, "image_token_id": 310, "text_config": text}).save_pretrained(tmp_path / "vl")
    (tmp_path / "vl" / "preprocessor_config.json").write_text("{}")
    return tmp_path


def test_the_tower_comes_out_as_it_went_in(folder, capsys):
    model = {"source": "vl", "init": "pretrained"}
    with contextlib.chdir(folder):
        assert main(["train", str(run_file(folder, model=model, train__steps=2, optim__warmup_steps=1))]) == 0
    assert "model.visual.* are passthrough tensors" in " ".join(capsys.readouterr().out.split())
    source, trained = spans_in_folder(folder / "vl"), spans_in_folder(folder / "run/hf")
    assert source.keys() == trained.keys()
    changed = {name for name, span in source.items() if _bytes(span) != _bytes(trained[name])}
    assert changed
    assert not any(name.startswith("model.visual.") for name in changed)
    configs = [json.loads((folder / name / "config.json").read_text()) for name in ("vl", "run/hf")]
    assert configs[0]["vision_config"] == configs[1]["vision_config"]
    assert (folder / "run/hf/preprocessor_config.json").exists()


def _bytes(span):
    with span.file.open("rb") as file:
        file.seek(span.offset)
        return file.read(span.nbytes)


def test_a_merged_model_has_the_tower_too(folder):
    model, lora = {"source": "vl", "init": "pretrained"}, {"r": 2, "target_modules": ["q_proj"], "merge": True}
    with contextlib.chdir(folder):
        assert main(["train", str(run_file(folder, model=model, lora=lora, train__steps=4))]) == 0
    source, merged = spans_in_folder(folder / "vl"), spans_in_folder(folder / "run/hf")
    assert source.keys() == merged.keys()
    changed = {name for name, span in source.items() if _bytes(span) != _bytes(merged[name])}
    assert {name.rpartition("self_attn.")[2] for name in changed} == {"q_proj.weight"}
