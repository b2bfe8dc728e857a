"""Quantised weights are dequantised as by formulas and as by transformers; other kinds are refused by name."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kumi.convert import convert, load_decoder
from kumi.convert.hf import read_folder
from kumi.convert.load_weights import weights_reader
from kumi.convert.open_model import open_source
from kumi.errors import ModelError
from kumi.spec import families


def set_method(folder: Path, method) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": method}))


def quantised_fp8(folder: Path, block=(24, 16)) -> dict[str, torch.Tensor]:
    """Quantise the layers' matrices in `folder` to fp8 with a scale a block; return them dequantised by block."""
    tensors = load_file(folder / "model.safetensors")
    meant = {}
    for name, value in list(tensors.items()):
        meant[name] = value
        if ".layers." in name and name.endswith("_proj.weight"):
            small = (value.float() * 100).to(torch.float8_e4m3fn)
            scales = torch.rand(-(-value.shape[0] // block[0]), -(-value.shape[1] // block[1])) + 0.5
            whole = small.float()
            for i in range(scales.shape[0]):
                for j in range(scales.shape[1]):
                    part = (slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1]))
                    whole[part] *= scales[i, j]
            meant[name] = whole.bfloat16()
            tensors |= {name: small, f"{name}_scale_inv": scales}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    set_method(folder, {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(block)})
    return meant


@pytest.mark.parametrize("case", ["llama", "deepseek-v3"])
def test_blocks_of_fp8(case, saved, tmp_path, monkeypatch):
    monkeypatch.setattr(read_folder, "BLOCK_BYTES", 500)
    source = saved(case, torch.bfloat16)
    meant = quantised_fp8(source)
    report = convert(source, tmp_path / "new", to="hf")
    assert "note: the weights are quantized by 'fp8'; kumi reads and writes them as bfloat16" in report
    tensors = load_file(tmp_path / "new/model.safetensors")
    assert tensors.keys() == meant.keys()
    assert all(
        torch.equal(tensors[name], value) and tensors[name].dtype == value.dtype for name, value in meant.items()
    )
    assert "quantization_config" not in json.loads((tmp_path / "new/config.json").read_text())
    convert(source, tmp_path / "native", to="kumi", layout="tp=2", dtype="float32")
    assert open_source(tmp_path / "native").read("model.layers.0.mlp.up_proj.weight").dtype == torch.float32


@pytest.mark.parametrize("case", ["llama", "qwen3", "qwen3-moe"])
def test_a_model_in_blocks_of_fp8_is_described_loaded_and_trained_from(case, saved):
    """In every function that reads such a folder: `load_decoder`, `plan`, `describe` and `model.source`."""
    source = saved(case, torch.bfloat16)
    meant = quantised_fp8(source)
    spec = families.from_hf(families.read_config(source))
    assert spec.notes[-1] == "the weights are quantized by 'fp8'; kumi reads and writes them as bfloat16"
    part = weights_reader(source, spec)
    name = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(part(f"model/{name}", (3, 0), (26, 20)), meant[name][3:29, :20])
    ids = torch.arange(24).reshape(1, 24)
    logits = load_decoder(source)(ids)
    save_file(meant, source / "model.safetensors", metadata={"format": "pt"})
    set_method(source, None)
    assert torch.equal(logits, load_decoder(source)(ids))


def test_fp8_with_one_scale_a_matrix_is_what_transformers_reads(saved):
    from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight  # takes seconds

    source = saved(dtype=torch.bfloat16)
    tensors = load_file(source / "model.safetensors")
    meant = dict(tensors)
    for name in [name for name in tensors if ".layers." in name and name.endswith("_proj.weight")]:
        scale = torch.rand(()) + 0.5
        tensors[name] = (tensors[name].float() * 100).to(torch.float8_e4m3fn)
        meant[name] = _dequantize_fp8_weight(tensors[name], scale, None, torch.float32).bfloat16()
        tensors |= {f"{name}_scale_inv": scale, name.replace("weight", "activation_scale"): torch.tensor(0.1)}
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    set_method(source, {"quant_method": "fp8", "weight_block_size": None, "activation_scheme": "static"})
    opened = open_source(source)
    assert all(torch.equal(opened.read(name), value) for name, value in meant.items())


def test_mxfp4_experts_are_what_transformers_reads(saved, tmp_path):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    source = saved("gpt-oss", torch.bfloat16)
    tensors = load_file(source / "model.safetensors")
    meant = dict(tensors)
    torch.manual_seed(0)
    for name in [name for name in tensors if name.endswith("experts.gate_up_proj")]:
        experts, columns, rows = tensors.pop(name).shape
        blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
        scales = torch.randint(115, 125, (experts, rows, columns // 32), dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        meant[name] = convert_moe_packed_tensors(blocks, scales)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    set_method(source, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    report = convert(source, tmp_path / "new", to="hf", verify=False)
    assert "quantized by 'mxfp4'" in report
    loaded = load_file(tmp_path / "new/model.safetensors")
    assert loaded.keys() == meant.keys()
    assert all(torch.equal(loaded[name], value) for name, value in meant.items())


def test_a_quantised_folder_is_loaded(saved):
    source = saved(dtype=torch.bfloat16)
    meant = quantised_fp8(source)
    name = "model.layers.1.self_attn.q_proj.weight"
    config = json.loads((source / "config.json").read_text())
    del config["quantization_config"]
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"has dtype F8_E4M3, and kumi reads"):
        load_decoder(source)
    set_method(source, {"quant_method": "fp8", "weight_block_size": [24, 16]})
    assert torch.equal(open_source(source).read(name), meant[name])


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ({"quant_method": "awq", "bits": 4}, "quantized by 'awq', and kumi reads fp8 and mxfp4 only"),
        ({}, "quantized by None"),
        ({"quant_method": "fp8"}, r"weight_block_size None, and kumi reads \[rows, columns\]"),
        ({"quant_method": "fp8", "weight_block_size": [0, 16]}, r"weight_block_size \[0, 16\]"),
        ({"quant_method": "fp8", "weight_block_size": [16, 16]}, r"scale_inv' is F32 .* in blocks of \[16, 16\] needs"),
        ("fp8", "quantization_config='?\"?fp8.* must be a table"),
    ],
)
def test_other_ways_are_refused_by_name(method, words, saved):
    source = saved(dtype=torch.bfloat16)
    quantised_fp8(source)
    set_method(source, method)
    with pytest.raises(ModelError, match=words):
        open_source(source)


def test_scales_that_are_missing_are_named(saved):
    source = saved(dtype=torch.bfloat16)
    quantised_fp8(source)
    tensors = load_file(source / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.weight_scale_inv"]
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(ModelError, match=r"'model.layers.0.mlp.up_proj.weight_scale_inv' is missing"):
        open_source(source)
