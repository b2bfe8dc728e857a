"""config.json files are read, refused in a sentence, and written back."""

import json

import pytest
from published_models import COUNTED, FURTHER, PUBLISHED

from kumi.errors import ModelError
from kumi.spec import families
from kumi.spec.ledger import num_params
from kumi.spec.model import Rope

LLAMA = PUBLISHED["Llama-3.1-8B"][0]
QWEN = PUBLISHED["Qwen2.5-7B"][0]


MODELS = PUBLISHED | FURTHER | COUNTED


@pytest.mark.parametrize("name", MODELS)
def test_published_parameter_counts(name):
    config, count = MODELS[name]
    assert num_params(families.from_hf(config)) == count


@pytest.mark.parametrize("name", MODELS)
def test_the_way_back_says_the_same(name):
    config, _ = MODELS[name]
    spec = families.from_hf(config)
    assert families.from_hf(families.to_hf(spec)) == spec
    assert families.patch_config(config, spec) == config


def test_equal_layers_are_equal_objects():
    spec = families.from_hf(LLAMA)
    assert all(layer is spec.layers[0] for layer in spec.layers)


def test_rope_of_llama_3():
    assert families.from_hf(LLAMA).layers[0].attention.rope == Rope(500000.0, "llama3", 8.0, 8192, 1.0, 4.0)


SCALINGS = {
    "default": {},
    "linear": {"factor": 2.0},
    "llama3": LLAMA["rope_scaling"],
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32768},
}


@pytest.mark.parametrize("kind", SCALINGS)
def test_every_spelling_of_rope_is_the_same_rope(kind):
    bare = {key: value for key, value in LLAMA.items() if key not in ("rope_scaling", "rope_theta")}
    table = {key: value for key, value in SCALINGS[kind].items() if key != "rope_type"}
    theta = {"rope_theta": 250000.0}
    spellings = [
        {**theta, "rope_scaling": {"rope_type": kind, **table}},
        {**theta, "rope_scaling": {"type": kind, **table}},
        {"rope_parameters": {"rope_type": kind, **theta, **table}},
        {
            **theta,
            "rope_scaling": {"rope_type": kind, **table},
            "rope_parameters": {"rope_type": kind, **theta, **table},
        },
    ]
    specs = {families.from_hf({**bare, **spelling}) for spelling in spellings}
    assert len(specs) == 1
    assert next(iter(specs)).layers[0].attention.rope.scaling == (None if kind == "default" else kind)


def test_spellings_that_contradict_each_other_are_refused():
    with pytest.raises(ModelError, match="contradicts"):
        families.from_hf({**LLAMA, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}})
    with pytest.raises(ModelError, match="contradicts"):
        families.from_hf({**PUBLISHED["Llama-2-7b"][0], "rope_theta": 1.0, "rope_parameters": {"rope_theta": 2.0}})


def test_without_a_rope_base_it_is_ten_thousand():
    assert families.from_hf(PUBLISHED["Llama-2-7b"][0]).layers[0].attention.rope == Rope(10000.0)


def test_eos_may_be_a_list():
    assert families.from_hf(PUBLISHED["Llama-3.3-70B-Instruct"][0]).eos_token_id == (128001, 128008, 128009)


def test_windows_of_qwen():
    sliding = QWEN | {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 20}
    windows = [layer.attention.sliding_window for layer in families.from_hf(sliding).layers]
    assert windows == [None] * 20 + [4096] * 8
    types = ["sliding_attention", "full_attention"] * 14
    windows = [layer.attention.sliding_window for layer in families.from_hf(sliding | {"layer_types": types}).layers]
    assert windows == [4096, None] * 14
    assert {layer.attention.sliding_window for layer in families.from_hf(QWEN).layers} == {None}
    for config in (sliding, sliding | {"layer_types": types}):
        spec = families.from_hf(config)
        assert families.from_hf(families.to_hf(spec)) == spec


def test_patching_changes_only_what_must_change():
    spec = families.from_hf(LLAMA)
    longer = families.from_hf(LLAMA | {"max_position_embeddings": 262144})
    assert families.patch_config(LLAMA, longer) == LLAMA | {"max_position_embeddings": 262144}
    new = {k: v for k, v in LLAMA.items() if k not in ("rope_scaling", "rope_theta")}
    new["rope_parameters"] = {"rope_theta": 500000.0, **LLAMA["rope_scaling"]}
    assert families.patch_config(new, spec) == new
    plain = families.from_hf(LLAMA | {"rope_scaling": None})
    patched = families.patch_config(new, plain)
    assert "rope_parameters" not in patched
    assert families.from_hf(patched) == plain


def test_a_config_without_architectures_gets_them():
    """As in a run file with `model.config`; other programs find the model's class by them."""
    bare = {key: value for key, value in LLAMA.items() if key != "architectures"}
    spec = families.from_hf(bare)
    assert families.patch_config(bare, spec) == bare | {"architectures": ["LlamaForCausalLM"]}
    score = families.from_hf(families.with_score_head(LLAMA))
    assert families.patch_config(bare, score)["architectures"] == ["LlamaForSequenceClassification"]


REFUSED = [
    ({"sliding_windw": 4}, r"'sliding_windw' \(4\) is not a key that kumi knows for a llama model"),
    ({"vocab_sizes": 4}, r"did you mean 'vocab_size'\?"),
    ({"hidden_size": "4096"}, r"hidden_size='4096' of a llama model must be an integer"),
    ({"hidden_size": True}, r"hidden_size=True of a llama model must be an integer"),
    ({"tie_word_embeddings": 1}, r"tie_word_embeddings=1 of a llama model must be true or false"),
    ({"rms_norm_eps": None}, r"rms_norm_eps=None of a llama model must be a number"),
    ({"eos_token_id": ["a"]}, r"eos_token_id=\['a'\] of a llama model must be an integer or list of integers"),
    ({"hidden_size": 0}, r"hidden_size=0 must be 1 or more"),
    ({"rms_norm_eps": float("nan")}, r"rms_norm_eps=nan of a llama model must be a finite number"),
    ({"initializer_range": -0.02}, r"initializer_range=-0.02 must not be negative"),
    ({"rope_theta": 0}, r"rope_theta=0 of the rotary embedding must be above 0"),
    ({"rope_scaling": {"type": "linear", "factor": -2.0}}, r"factor=-2.0 of the rotary embedding must be above 0"),
    ({"num_key_value_heads": 5}, r"num_key_value_heads=5 does not divide num_attention_heads=32"),
    ({"num_attention_heads": 33, "num_key_value_heads": 33}, r"=33 does not divide hidden_size=4096"),
    ({"head_dim": 63}, r"head_dim=63 is odd"),
    ({"attention_dropout": "0.1"}, r"attention_dropout='?\"?0.1.* of a llama model must be a number"),
    ({"hidden_act": "gelu"}, r"hidden_act='gelu' of a llama model is not supported, only 'silu'"),
    ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor=0.5"),
    ({"quantization_config": 4}, r"quantization_config=4 must be a table"),
    ({"is_encoder_decoder": 1}, r"is_encoder_decoder=1"),
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, r"'dynamic' changes with the length"),
    ({"rope_scaling": {"type": "longrope"}}, r"rope type 'longrope' of a llama model is not supported; kumi supports"),
    ({"rope_scaling": {"type": "linear"}}, r"'factor' is missing"),
    ({"rope_scaling": {"type": "linear", "factor": 2.0, "fctor": 1}}, r"'fctor'"),
    ({"rope_scaling": 3}, r"rope_scaling=3 of a llama model must be a table"),
    (
        {"architectures": ["T5ForConditionalGeneration"], "model_type": "t5"},
        r"model_type='?\"?t5.* is not supported: it has an encoder in addition to its decoder; "
        r"docs/models.md lists the \d+",
    ),
    ({"architectures": ["BertForMaskedLM"], "model_type": "bert"}, r"not supported: it is an encoder"),
    (
        {"architectures": ["CohereForCausalLM"], "model_type": "cohere"},
        r"not supported: unlike cohere2, all its layers have RoPE and none has a sliding window",
    ),
    ({"architectures": ["MistralForCausalLM2"], "model_type": "mistral2"}, r"supported: kumi has no family of"),
    (
        {"architectures": ["LlamaForSequenceClassification"]},
        r"LlamaForSequenceClassification.* with 2 labels is not supported: .* reward models, which have one label",
    ),
    ({"architectures": ["LlamaForCausaLM"]}, r"the architecture of a llama model is another one"),
    ({"model_type": "qwen2"}, r"model_type='?\"?qwen2.* is not supported"),
]


@pytest.mark.parametrize(("change", "words"), REFUSED, ids=[str(next(iter(change))) for change, _ in REFUSED])
def test_what_is_not_understood_is_refused_in_a_sentence(change, words):
    with pytest.raises(ModelError, match=words):
        families.from_hf(LLAMA | change)


@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"])
def test_a_missing_key_is_named(key):
    with pytest.raises(ModelError, match=f"'{key}' is missing"):
        families.from_hf({name: value for name, value in LLAMA.items() if name != key})


def test_the_architecture_alone_or_the_type_alone_will_do():
    spec = families.from_hf(LLAMA)
    for key in ("architectures", "model_type"):
        assert families.from_hf({name: value for name, value in LLAMA.items() if name != key}) == spec


def test_windows_that_contradict_themselves_are_refused():
    with pytest.raises(ModelError, match="use_sliding_window=False"):
        families.from_hf(QWEN | {"layer_types": ["sliding_attention"] * 28})
    with pytest.raises(ModelError, match="27 entries"):
        families.from_hf(QWEN | {"layer_types": ["full_attention"] * 27})
    with pytest.raises(ModelError, match="'chunked_attention'"):
        families.from_hf(QWEN | {"layer_types": ["chunked_attention"] * 28})
    with pytest.raises(ModelError, match="contradicts sliding_window=4096"):
        families.from_hf(PUBLISHED["Mistral-7B-v0.1"][0] | {"layer_types": ["full_attention"] * 32})


def test_a_model_that_a_family_cannot_say_is_not_written():
    from dataclasses import replace

    spec = families.from_hf(PUBLISHED["Qwen3-0.6B"][0])
    with pytest.raises(ModelError, match="cannot be written as a llama"):
        families.to_hf(replace(spec, family="llama"))


def test_files(tmp_path):
    with pytest.raises(ModelError, match=r"config\.json does not exist"):
        families.read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="not valid JSON"):
        families.read_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelError, match="holds a list"):
        families.read_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert families.read_config(tmp_path) == families.read_config(tmp_path / "config.json") == LLAMA
