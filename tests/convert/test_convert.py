"""Hugging Face -> kumi -> Hugging Face, bit for bit, for every family; the command's checks."""

import json
import re
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from grids import sampled
from kumi import load_decoder
from kumi.convert import convert, verify
from kumi.convert.hf import write_folder
from kumi.convert.open_model import open_source
from kumi.errors import ConfigError, ModelError, RefusedError
from tiny_models import CASES


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}


def same(first: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return first.keys() == other.keys() and all(
        value.dtype == other[name].dtype and torch.equal(value, other[name]) for name, value in first.items()
    )


@pytest.mark.parametrize("case", CASES)
def test_round_trip_is_exact(case, saved, tmp_path):
    dtype = torch.bfloat16 if "tied" in case else torch.float32
    source = saved(case, dtype, max_shard_size="20KB" if "window" in case else "5GB")
    convert(source, tmp_path / "native", to="kumi")
    convert(tmp_path / "native", tmp_path / "back", to="hf")
    assert same(tensors(source), tensors(tmp_path / "back"))
    assert json.loads((tmp_path / "back/config.json").read_text()) == json.loads((source / "config.json").read_text())


def test_settings_of_generation_are_kept(saved, tmp_path):
    source = saved()
    settings = {"eos_token_id": [3, 5], "temperature": 0.6, "top_p": 0.9}
    (source / "generation_config.json").write_text(json.dumps(settings))
    convert(source, tmp_path / "native", to="kumi")
    convert(tmp_path / "native", tmp_path / "back", to="hf")
    assert json.loads((tmp_path / "back/generation_config.json").read_text()) == settings
    (source / "generation_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"generation_config\.json: not valid JSON"):
        convert(source, tmp_path / "new", to="hf")
    assert not (tmp_path / "new").exists()


LOADED = [
    "llama-tied",
    "mistral-window",
    "qwen3",
    "mixtral-window",
    "qwen3-moe",
    "olmoe",
    "deepseek-v2",
    "deepseek-v3",
    "phi3-partial",
    "phi3-longrope",
    "gemma2",
    "gemma2-uncapped",
    "gemma3",
    "gpt-oss",
    "gpt-neox",
    "gpt2-wide",
    "falcon-groups",
    "falcon-in-turn",
    "bloom",
    "nemotron-h",
    "nemotron-h-moe",
]


@pytest.mark.parametrize(
    ("case", "anew"),
    # By default with the config.json as it was, which test_round_trip_is_exact compares, in one case of each kind.
    sampled(
        [(case, anew) for anew in (True, False) for case in LOADED],
        lambda place: place < len(LOADED) or LOADED[place - len(LOADED)] in ("llama-tied", "deepseek-v3", "gpt2-wide"),
    ),
)
def test_transformers_loads_what_kumi_wrote(case, anew, saved, tmp_path):
    """With the original config.json, or with one made `anew` from the model."""
    source = saved(case)
    opened = open_source(source)
    write_folder.write_hf_folder(
        tmp_path / "new",
        opened.spec,
        opened.tensors(),
        base_config=None if anew else opened.config,
        dtype=opened.dtypes,
        tokenizer_folder=None,
        card="",
    )
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "new")
    ids = torch.arange(20)[None]
    assert (theirs(ids).logits - load_decoder(source)(ids)).abs().max() <= 1e-5


def test_verification_finds_a_changed_bit_and_reports_in_the_card(saved, tmp_path):
    source = saved()
    done = convert(source, tmp_path / "new", to="hf", verify=True)
    words = r"all 21 tensors equal, bit by bit; largest logit difference \S+ from transformers \S+'s"
    assert re.search(f"21,728 parameters written as hf; verified against .*: {words}", done)
    assert re.search(rf"\| verified \| against the source: {words} \|", (tmp_path / "new/README.md").read_text())
    weights = tmp_path / "new/model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(ModelError, match=r"'lm_head\.weight' differs from"):
        verify.verify(open_source(source), open_source(tmp_path / "new"))


def test_what_is_refused(saved, tmp_path):
    source = saved()
    with pytest.raises(ConfigError, match="--to gguf: kumi writes hf, kumi and megatron"):
        convert(source, tmp_path / "new", to="gguf")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").write_text("")
    for to in ("hf", "kumi"):
        with pytest.raises(RefusedError, match="exists and is not empty"):
            convert(source, tmp_path / "full", to=to)
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["file"]
    with pytest.raises(ModelError, match="neither a Hugging Face folder"):
        convert(tmp_path / "full", tmp_path / "new", to="hf")


def test_a_damaged_checkpoint_is_refused(saved, tmp_path):
    convert(saved(), tmp_path / "native", to="kumi", verify=False)
    shard = next((tmp_path / "native").glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(RefusedError, match="damaged"):
        convert(tmp_path / "native", tmp_path / "new", to="hf")
    assert not (tmp_path / "new").exists()
    assert not list(tmp_path.glob("*new*"))


@pytest.mark.parametrize(("to", "suffix"), [("hf", ".part"), ("kumi", ".tmp")])
def test_folders_with_a_name_like_the_target_are_left_alone(to, suffix, saved, tmp_path):
    beside = tmp_path / f"new{suffix}"
    beside.mkdir()
    (beside / "mine").write_text("years of work")
    convert(saved(), tmp_path / "new", to=to, verify=False)
    assert (beside / "mine").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["llama-source", "new", f"new{suffix}"]


def test_an_adapter_and_a_target_inside_a_file_are_refused(saved, tmp_path):
    (tmp_path / "lora").mkdir()
    (tmp_path / "lora" / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match="a LoRA adapter, not a complete model; merge it"):
        open_source(tmp_path / "lora")
    with pytest.raises(ModelError, match="peft_type is None, and kumi reads LoRA"):
        convert(tmp_path / "lora", tmp_path / "new", to="kumi")
    for to in ("hf", "kumi"):
        with pytest.raises(RefusedError, match=r"config\.json is a file; name another folder"):
            convert(saved(), tmp_path / "llama-source" / "config.json" / "new", to=to)


def test_a_target_without_a_name_is_refused(saved):
    with pytest.raises(ConfigError, match="empty name"):
        convert(saved(), "", to="hf")
