"""Passthrough tensors (vision towers, layers for multi-token prediction) are copied bit for bit."""

import json
from dataclasses import replace

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from kumi.convert import convert, load_decoder
from kumi.convert.files.safetensors_read import spans_in_folder
from kumi.convert.hf import write_folder
from kumi.convert.hf.passthrough import FILE, passthrough_tensors
from kumi.convert.open_model import open_source
from kumi.convert.verify import verify
from kumi.errors import ModelError
from kumi.spec import families
from kumi.storage import checkpoint

SEEING = ("gemma3-sees", "ministral3-sees", "qwen2.5-vl", "qwen3-vl-tied", "nemotron-h-omni")


def with_layers_beyond(folder, count):
    """`folder`, whose model has 2 layers, with `count` more that predict further ahead; one tensor of each in fp8."""
    weights = load_file(folder / "model.safetensors")
    for index in range(2, 2 + count):
        weights[f"model.layers.{index}.eh_proj.weight"] = torch.randn(4, 8).to(torch.float8_e4m3fn)
        weights[f"model.layers.{index}.enorm.weight"] = torch.randn(4)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    file = folder / "config.json"
    config = {k: v for k, v in json.loads(file.read_text()).items() if k != "num_mtp_layers"}
    file.write_text(json.dumps(config | {"num_nextn_predict_layers": count}))
    return folder


@pytest.mark.parametrize("anew", [False, True])
@pytest.mark.parametrize("case", SEEING)
def test_transformers_loads_the_whole_of_a_model_that_sees(case, anew, saved, tmp_path):
    """With the original config.json, or with one made `anew` from the model."""
    source = saved(case)
    opened = open_source(source)
    assert opened.passthrough
    write_folder.write_hf_folder(
        tmp_path / "new",
        opened.spec,
        opened.tensors(),
        base_config=None if anew else opened.config,
        dtype=opened.dtypes,
        tokenizer_folder=None,
        card="",
        passthrough=opened.passthrough,
    )
    kind = getattr(transformers, opened.config["architectures"][0])
    theirs, info = kind.from_pretrained(tmp_path / "new", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    before = dict(kind.from_pretrained(source).named_parameters())
    assert all(parameter.equal(before[name]) for name, parameter in theirs.named_parameters())
    ids = torch.arange(20)[None]
    assert (theirs.eval()(input_ids=ids).logits - load_decoder(source)(ids)).abs().max() <= 1e-5


@pytest.mark.parametrize("case", ["glm4-moe", "deepseek-v3"])
def test_layers_that_predict_further_ahead(case, saved, tmp_path):
    source = with_layers_beyond(saved(case), 2)
    assert sorted(passthrough_tensors(source, families.from_hf(families.read_config(source)))) == [
        f"model.layers.{index}.{name}.weight" for index in (2, 3) for name in ("eh_proj", "enorm")
    ]
    report = convert(source, tmp_path / "native", to="kumi")
    assert "and 4 passthrough tensors copied unchanged" in report
    convert(tmp_path / "native", tmp_path / "back", to="hf")
    assert json.loads((tmp_path / "back/config.json").read_text()) == json.loads((source / "config.json").read_text())
    assert spans_in_folder(tmp_path / "back").keys() == spans_in_folder(source).keys()
    fewer = json.loads((source / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (source / "config.json").write_text(json.dumps(fewer))
    with pytest.raises(ModelError, match=r"'model\.layers\.3\.\w+\.weight' .* has no place|has dtype F8_E4M3"):
        open_source(source)


def test_a_changed_bit_of_what_is_carried_is_found(saved, tmp_path):
    source = saved("qwen3-vl")
    convert(source, tmp_path / "native", to="kumi", verify=False)
    file = tmp_path / "native" / FILE
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(ModelError, match=r"'model\.visual\.[\w.]+' differs from"):
        verify(open_source(source), open_source(tmp_path / "native"))
    file.unlink()
    with pytest.raises(ModelError, match="is in only one of source and target"):
        verify(open_source(source), open_source(tmp_path / "native"))


def test_a_checkpoint_of_a_run_finds_what_it_left_in_its_source(saved, tmp_path):
    source = saved("qwen2.5-vl")
    opened = open_source(source)
    pieces = [
        checkpoint.Piece(f"model/{name}", tuple(value.shape), (0,) * value.ndim, value)
        for name, value in opened.tensors()
    ]
    checkpoint.write_pieces(tmp_path / "part", 0, pieces)
    meta = {"hf_config": dict(opened.config), "tokenizer": None, "carried_from": str(source)}
    checkpoint.commit(tmp_path / "part", tmp_path / "saved", meta, ranks=1)
    convert(tmp_path / "saved", tmp_path / "new", to="hf", verify=False)
    assert spans_in_folder(tmp_path / "new").keys() == spans_in_folder(source).keys()
    source.rename(tmp_path / "away")
    with pytest.raises(ModelError, match=r"the tensors visual\.\*, which kumi copies unchanged, are in .* restore it"):
        open_source(tmp_path / "saved")


def test_what_is_carried_is_said(saved):
    spec = families.from_hf(families.read_config(saved("gemma3-sees")))
    assert spec.notes == (
        "vision_tower.*, multi_modal_projector.* are passthrough tensors: copied unchanged, "
        "not computed, not trained, not counted",
    )


def test_a_larger_vocabulary_changes_the_text_alone(saved):
    for case in SEEING:
        config = families.read_config(saved(case))
        spec = replace(families.from_hf(config), vocab_size=128)
        changed = config | {"text_config": config["text_config"] | {"vocab_size": 128}}
        assert families.patch_config(config, spec) == changed
        flat = {key: value for key, value in changed.items() if key != "text_config"} | changed["text_config"]
        flat |= {key: config[key] for key in ("model_type", "architectures")}
        if case.startswith("qwen2"):
            assert replace(families.from_hf(flat), notes=()) == spec
            assert families.patch_config(flat | {"vocab_size": 97}, spec) == flat
