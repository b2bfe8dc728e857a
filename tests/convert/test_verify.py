"""The comparisons of --verify, the ones that it reports as left out, and its errors."""

import importlib.util
import json

import pytest
import torch

from kumi.convert import convert, verify
from kumi.convert.hf import read_folder
from kumi.convert.open_model import open_source
from kumi.errors import ModelError


def test_a_model_that_does_not_fit_the_memory_is_compared_without_logits(saved, tmp_path, monkeypatch):
    monkeypatch.setattr(verify, "free_memory", lambda: 100_000)
    report = convert(saved(), tmp_path / "new", to="hf")
    assert "all 21 tensors equal, bit by bit; logits not compared: in float32 they need " in report
    assert "logits not compared" in (tmp_path / "new/README.md").read_text()


def test_logits_are_kumi_s_own_where_transformers_cannot_say(saved, tmp_path, monkeypatch):
    source = saved()
    convert(source, tmp_path / "a", to="kumi", verify=False)
    report = convert(tmp_path / "a", tmp_path / "b", to="kumi", layout="tp=2")
    assert "largest logit difference 0 from those of a by kumi (there is no plain Hugging Face folder)" in report
    path = source / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": ["LlamaForCausalLM"]}))
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "transformers" else find(name))
    assert "by kumi (transformers is not installed)" in convert(source, tmp_path / "c", to="hf")


def test_another_dtype_is_verified_as_it_was_written(saved, tmp_path):
    report = convert(saved("qwen3"), tmp_path / "new", to="hf", dtype="bfloat16")
    assert "tensors equal, bit by bit" in report


def test_logits_that_differ_are_an_error(saved, tmp_path, monkeypatch):
    source = saved()
    convert(source, tmp_path / "new", to="hf", verify=False)
    other = verify._transformers_logits
    monkeypatch.setattr(verify, "_transformers_logits", lambda *given: other(*given) + 0.1)
    with pytest.raises(ModelError, match=r"its logits by kumi differ from transformers .* all tensors are equal"):
        verify.verify(open_source(source), open_source(tmp_path / "new"))


def test_any_changed_block_is_found(saved, tmp_path, monkeypatch):
    monkeypatch.setattr(read_folder, "BLOCK_BYTES", 300)
    source = saved("phi3", torch.bfloat16)
    convert(source, tmp_path / "new", to="hf", verify=False)
    weights = tmp_path / "new/model.safetensors"
    good = weights.read_bytes()
    for place in (len(good) // 3, len(good) // 2, len(good) - 1):
        bad = bytearray(good)
        bad[place] ^= 1
        weights.write_bytes(bytes(bad))
        with pytest.raises(ModelError, match=r"differs from .*; the disk may be failing"):
            verify.verify(open_source(source), open_source(tmp_path / "new"))
