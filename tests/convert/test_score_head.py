"""Reward models: a language model gets a score head, and transformers loads the result as its sequence classifier."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

from grids import sampled
from kumi.convert import convert, load_decoder, weights_reader
from kumi.convert.hf import read_folder
from kumi.convert.hf.card import model_card
from kumi.convert.hf.padding import padding_token
from kumi.convert.hf.write_folder import write_hf_folder
from kumi.errors import ModelError
from kumi.nn.decoder import Decoder
from kumi.spec import families
from kumi.spec.families._shared.classifiers import CLASSIFIERS
from kumi.spec.ledger import params
from tiny_models import CASES as TINY

# A tiny model of each family with a classifier, and variants: tied heads, and scales or caps of logits.
TESTED = ["llama-tied", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "qwen3-moe"]
OTHERS = [
    *("llama", "gemma", "mixtral", "qwen2-moe", "deepseek-v2", "deepseek-v3", "glm4", "seed-oss", "olmo2", "olmo3"),
    *("ministral", "ministral3", "smollm3", "starcoder2", "phi3", "gpt-neox", "gpt2", "gpt2-wide", "falcon", "bloom"),
    *("gpt-oss", "mixtral-window", "qwen3-biases"),
]


def scored(folder: Path, seed: int = 3) -> Decoder:
    """Return a reward model of the language model in `folder`."""
    spec = families.from_hf(families.with_score_head(families.read_config(folder)))
    read, decoder = weights_reader(folder, spec, seed), Decoder(spec)
    with torch.no_grad():
        for name, tensor in decoder.state_dict().items():
            tensor.copy_(read(f"model/{name}", (0,) * tensor.ndim, tuple(tensor.shape)))
    return decoder.eval()


def export(decoder: Decoder, source: Path, folder: Path) -> Path:
    write_hf_folder(
        folder,
        decoder.spec,
        iter(decoder.state_dict().items()),
        base_config=families.with_score_head(families.read_config(source)),
        dtype="float32",
        tokenizer_folder=source,
        card=model_card(name="reward", model=decoder.spec, facts={}),
    )
    return folder


@torch.no_grad()
@pytest.mark.parametrize("case", sampled([(c,) for c in (*TESTED, *OTHERS)], lambda place: place < len(TESTED), str))
def test_transformers_computes_the_same_scores(saved, tmp_path, case):
    source = saved(case)
    decoder = scored(source)
    folder = export(decoder, source, tmp_path / "reward")
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    assert type(model).__name__ == CLASSIFIERS[decoder.spec.family]
    assert model.config.id2label == {0: "LABEL_0"}
    model.config.pad_token_id = pad = 96
    ids = torch.randint(3, 96, (3, 12), generator=torch.Generator().manual_seed(1))
    ends = torch.tensor([12, 7, 9])
    theirs = model(ids.masked_fill(torch.arange(12) >= ends[:, None], pad)).logits.squeeze(1)
    ours = decoder(ids)[torch.arange(3), ends - 1]
    assert ours.dtype == torch.float32
    assert torch.allclose(ours, theirs, rtol=0, atol=1e-5)
    assert ours.std() > 1e-3
    again = load_decoder(folder)
    assert again.spec.head == "score"
    assert torch.equal(again.eval()(ids), decoder(ids))


def test_conversions_keep_the_score_head(saved, tmp_path):
    source = saved("llama-tied")
    folder = export(scored(source), source, tmp_path / "reward")
    by_transformers = f"from transformers {transformers.__version__}'s"
    assert by_transformers in convert(folder, tmp_path / "kumi", to="kumi", layout="tp=2,pp=2,dp_shard=2,zero=1")
    assert by_transformers in convert(tmp_path / "kumi", tmp_path / "back", to="hf")
    before, after = (load_file(each / "model.safetensors") for each in (folder, tmp_path / "back"))
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert not {"lm_head.weight"} & set(after)
    card = (tmp_path / "back" / "README.md").read_text()
    assert "AutoModelForSequenceClassification" in card
    assert "text-classification" in card
    with pytest.raises(ModelError, match=r"'score\.weight' .* has no counterpart in a Megatron-Core"):
        convert(folder, tmp_path / "megatron", to="megatron")


def test_a_reward_model_keeps_its_scores(saved, tmp_path):
    source = saved()
    first = scored(source, seed=3)
    folder = export(first, source, tmp_path / "reward")
    assert torch.equal(scored(folder, seed=4).state_dict()["score.weight"], first.state_dict()["score.weight"])
    assert not torch.equal(scored(source, seed=4).state_dict()["score.weight"], first.state_dict()["score.weight"])
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("score.weight")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ModelError, match=r"'score\.weight' is missing .*: fetch its weights again, or name the language"
    ):
        scored(folder)


def test_only_the_head_may_differ(saved):
    source = saved()
    tensors = load_file(source / "model.safetensors") | {"extra": torch.zeros(2)}
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"'extra' \(2,\) is not a tensor of the llama model"):
        scored(source)


def test_the_families_are_those_of_transformers():
    classes = {name: MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.get(name) for name in families.FAMILIES}
    # The classifier of gemma3 scores images, too.
    assert {name: value for name, value in classes.items() if value and name != "gemma3"} == CLASSIFIERS
    assert {TINY[case][0] for case in (*TESTED, *OTHERS)} == {
        name.removesuffix("ForSequenceClassification") for name in CLASSIFIERS.values()
    }


@pytest.mark.parametrize("case", ["cohere2", "olmoe", "nemotron-h", "qwen3-vl", "glm4-moe", "granite"])
def test_other_families_are_refused(saved, case):
    with pytest.raises(ModelError, match=r"cannot become a reward model, because transformers has no sequence classif"):
        scored(saved(case))


def test_configs_of_reward_models(saved):
    config = json.loads((saved("gemma2") / "config.json").read_text())
    scored_config = families.with_score_head(config)
    spec, model = families.from_hf(scored_config), families.from_hf(config)
    assert spec == replace(model, head="score", tie_word_embeddings=False)
    assert families.from_hf(families.to_hf(spec)) == spec
    assert families.from_hf(families.patch_config(config, spec)) == spec
    assert families.with_score_head(scored_config) == scored_config
    assert [param.name for param in params(spec)] == [*(param.name for param in params(model)), "score.weight"]
    for labels in ({"num_labels": 2}, {"id2label": {"0": "a", "1": "b", "2": "c"}}, {"id2label": None}):
        with pytest.raises(ModelError, match=r"with [23] labels is not supported: .* which have one label"):
            families.from_hf(scored_config | labels)


TOKENS = ["<s>", "</s>", "<unk>", "<|image_pad|>", "<|reserved_0|>", "<|pad|>"]


@pytest.mark.parametrize(
    ("config", "settings", "tokens", "chosen"),
    [
        ({"pad_token_id": 5, "eos_token_id": [1, 2]}, {}, TOKENS, (5, "")),
        # A padding token that ends sequences is none.
        ({"pad_token_id": 1, "eos_token_id": 1}, {}, TOKENS, (5, "<|pad|>")),
        ({"eos_token_id": 0}, {"eos_token": "</s>", "pad_token": "</s>"}, TOKENS[:5], (4, "<|reserved_0|>")),
        ({"eos_token_id": [1]}, {"pad_token": {"content": "<|reserved_0|>"}}, TOKENS, (4, "<|reserved_0|>")),
        ({"eos_token_id": 1}, {"unk_token": "<unk>"}, TOKENS[:4], (2, "<unk>")),
        ({"eos_token_id": 1}, {}, TOKENS[:4], None),
        ({"eos_token_id": 1, "vocab_size": 5}, {}, TOKENS, (4, "<|reserved_0|>")),
    ],
)
def test_padding_is_no_end_of_a_sequence(tmp_path, config, settings, tokens, chosen):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    added = [{"id": number, "content": token, "special": True} for number, token in enumerate(tokens)]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    assert padding_token({"vocab_size": 10} | config, tmp_path) == chosen


def test_an_export_names_its_padding(saved, tmp_path):
    source = saved()
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"pad_token_id": None, "eos_token_id": 2}))
    added = [{"id": 2, "content": "</s>", "special": True}, {"id": 7, "content": "<pad>", "special": True}]
    (source / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    (source / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "pad_token": "</s>"}))
    folder = export(scored(source), source, tmp_path / "reward")
    assert json.loads((folder / "config.json").read_text())["pad_token_id"] == 7
    assert json.loads((folder / "tokenizer_config.json").read_text()) == {"eos_token": "</s>", "pad_token": "<pad>"}


def test_the_head_of_a_language_model_is_left_out(saved):
    """Whether it has a tensor or is the embedding."""
    for case, tied in (("llama", False), ("llama-tied", True)):
        folder = saved(case)
        spec = families.from_hf(families.with_score_head(families.read_config(folder)))
        begun = read_folder.spec_of_folder(folder, spec)
        assert (begun.head, begun.tie_word_embeddings) == ("lm", tied)
        assert "score.weight" not in read_folder.locate_params(folder, begun)
