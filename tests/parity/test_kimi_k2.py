"""Kimi-K2, which transformers knows only by the code in its folder: the same model as DeepSeek-V3."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch
from test_exact import check

import kumi
from kumi.convert import convert
from kumi.errors import ModelError
from kumi.spec import families
from tiny_models import LATENT, decoder_of, reference_of
from weights import read_tensors

# The rotation as published, of another original context: all pairs are stretched from the first or not at all.
ROPE = {
    "rope_type": "yarn",
    "rope_theta": 50000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 1.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
CHANGES = {
    **LATENT,
    "n_shared_experts": 1,
    "q_lora_rank": 12,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.827,
    "rope_parameters": ROPE,
}
CODE = {
    "configuration_deepseek.DeepseekV3Config": "AutoConfig",
    "modeling_deepseek.DeepseekV3ForCausalLM": "AutoModelForCausalLM",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder as Kimi-K2 is published, and transformers' model of it."""
    path = tmp_path_factory.mktemp("kimi") / "source"
    reference = reference_of("DeepseekV3", CHANGES)
    reference.save_pretrained(path)
    config = json.loads((path / "config.json").read_text())
    code = {name: place for place, name in CODE.items()}
    (path / "config.json").write_text(json.dumps(config | {"model_type": "kimi_k2", "auto_map": code}))
    return path, reference


def test_logits_are_those_of_deepseek_v3(folder):
    path, reference = folder
    ids = torch.randint(0, 97, (2, 24), generator=torch.Generator().manual_seed(1))
    expected = reference(input_ids=ids, use_cache=False).logits
    assert (kumi.load_decoder(path)(ids) - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert torch.equal(kumi.load_decoder(path)(ids), decoder_of(reference)(ids))
    check(partial(reference_of, "DeepseekV3", CHANGES))


def test_a_round_trip_keeps_the_name_the_code_and_every_bit(folder, tmp_path):
    path, _ = folder
    code = {"modeling_deepseek.py": "import this\n", "configuration_deepseek.py": "raise SystemExit\n"}
    for name, text in code.items():
        (path / name).write_text(text)
    convert(path, tmp_path / "native", to="kumi")
    convert(tmp_path / "native", tmp_path / "back", to="hf")
    source, back = (dict(read_tensors(one)) for one in (path, tmp_path / "back"))
    assert source.keys() == back.keys()
    assert all(value.equal(back[key]) for key, value in source.items())
    configs = [json.loads((one / "config.json").read_text()) for one in (path, tmp_path / "back")]
    assert configs[0] == configs[1]
    assert {name: (tmp_path / "back" / name).read_text() for name in code} == code


def test_a_spec_is_written_under_its_own_name(folder):
    spec = families.from_hf(families.read_config(folder[0]))
    assert spec.family == "kimi_k2"
    written = families.to_hf(spec)
    assert (written["model_type"], written["architectures"]) == ("kimi_k2", ["DeepseekV3ForCausalLM"])
    assert families.from_hf({**written, "model_type": "deepseek_v3"}).family == "deepseek_v3"
    assert (
        families.from_hf({key: value for key, value in written.items() if key != "model_type"}).family == "deepseek_v3"
    )
    with pytest.raises(ModelError, match="model_type='kimi_k3' is not supported"):
        families.from_hf({**written, "model_type": "kimi_k3"})
