"""Further families: their differences from Llama, and the configurations that are refused."""

from dataclasses import replace

import pytest
from published_models import COUNTED, FURTHER

from kumi.errors import ModelError
from kumi.spec import families
from kumi.spec.model import MLP, MoE

CONFIGS = {name: config for name, (config, _) in (FURTHER | COUNTED).items()}


def spec(name, **changes):
    return families.from_hf(CONFIGS[name] | changes)


def test_layers_without_positions():
    assert [layer.attention.rope is None for layer in spec("SmolLM3-3B").layers[:5]] == [False] * 3 + [True, False]
    config = {key: value for key, value in CONFIGS["SmolLM3-3B"].items() if key != "no_rope_layers"}
    assert families.from_hf(config) == spec("SmolLM3-3B")
    command = spec("Command-R7B").layers
    assert [layer.window for layer in command[:5]] == [4096] * 3 + [None, 4096]
    assert all((layer.attention.rope is None) == (layer.window is None) for layer in command)
    assert command[0].attention.rope.interleave


def test_norms():
    olmo, command = spec("OLMo-2-7B"), spec("Command-R7B")
    assert (olmo.layers[0].pre_norms, olmo.layers[0].post_norms) == (False, True)
    assert (command.norm, command.norm_bias, command.layers[0].shared_norm) == ("layernorm", False, True)
    assert spec("starcoder2-7b").norm_bias


def test_the_two_rotations_of_olmo_3():
    olmo = spec("allenai/Olmo-3-7B-Instruct")
    assert [layer.window for layer in olmo.layers[:5]] == [4096, 4096, 4096, None, 4096]
    assert [layer.attention.rope.scaling for layer in olmo.layers[2:4]] == [None, "yarn"]
    theta = {"rope_theta": 1000.0}
    with pytest.raises(ModelError, match=r"rope_theta=1000 of an olmo3 model is ambiguous: transformers 4"):
        spec("allenai/Olmo-3-7B-Instruct", **theta)
    tables = {
        "sliding_attention": {"rope_type": "default", **theta},
        "full_attention": {"rope_type": "default", **theta},
    }
    both = spec("allenai/Olmo-3-7B-Instruct", rope_scaling=None, **theta, rope_parameters=tables)
    assert families.from_hf(families.to_hf(both)) == both
    with pytest.raises(ModelError, match=r"rope_parameters=.* contradicts rope_theta=500000 "):
        spec("allenai/Olmo-3-7B-Instruct", rope_scaling=None, rope_parameters=tables)


def test_the_shared_expert_of_qwen2_has_a_gate():
    qwen = spec("Qwen/Qwen1.5-MoE-A2.7B").layers[0].mlp
    assert (qwen.shared_intermediate_size, qwen.shared_gate, qwen.norm_topk_prob) == (5632, True, False)


def test_the_gelu_of_the_first_gemma_is_the_approximation():
    """Under both names of the key, and for the value of the first configs."""
    for keys in ({"hidden_act": "gelu"}, {"hidden_act": "gelu", "hidden_activation": "gelu_pytorch_tanh"}):
        assert spec("google/gemma-7b", **keys).layers[0].mlp.hidden_act == "gelu_pytorch_tanh"


def test_factors_of_granite():
    granite = spec("Granite-3.0-8B")
    assert (granite.embedding_scale, granite.residual_scale, granite.logit_scale) == (12.0, 0.22, 1 / 16)
    assert granite.layers[0].attention.score_scale == 0.0078125


def test_layers_of_glm():
    glm = spec("GLM-4.5-Air")
    assert [type(layer.mlp) for layer in glm.layers[:2]] == [MLP, MoE]
    assert glm.layers[1].mlp.has_correction_bias
    assert glm.layers[0].attention.rotary_dim == 64
    assert glm.weights.passthrough == ("model.layers.46.",)
    assert "model.layers.46.* are layers for multi-token prediction: passthrough tensors" in glm.notes[0]
    assert (
        spec("GLM-4.5-Air", num_nextn_predict_layers=None, num_mtp_layers=2).weights.passthrough[-1]
        == "model.layers.47."
    )


def test_the_text_of_a_model_that_sees():
    gemma = spec("gemma-3-4b")
    assert (gemma.vocab_size, gemma.num_hidden_layers, gemma.tie_word_embeddings) == (262_208, 34, True)
    assert [layer.window for layer in gemma.layers[4:7]] == [1024, None, 1024]
    assert gemma.layers[5].attention.rope.factor == 8.0
    assert gemma.weights.passthrough == ("vision_tower.", "multi_modal_projector.")
    qwen, plain = spec("Qwen2.5-VL-7B"), families.from_hf(CONFIGS["Qwen2.5-VL-7B"] | {"rope_scaling": None})
    assert qwen.layers == plain.layers


def test_what_is_carried_is_written_again():
    for name in ("Qwen2.5-VL-7B", "Qwen3-VL-4B", "gemma-3-4b"):
        written = families.to_hf(spec(name))
        assert written["vision_config"] == CONFIGS[name]["vision_config"]
        other = written | {"vision_config": {"hidden_size": 1}}
        assert families.from_hf(other) != spec(name)
    sections = families.to_hf(spec("Qwen3-VL-4B"))["text_config"]["rope_scaling"]
    assert sections == CONFIGS["Qwen3-VL-4B"]["text_config"]["rope_scaling"]


def test_only_what_changes_is_changed_in_a_model_that_sees():
    for name in ("Qwen3-VL-4B", "gemma-3-4b"):
        longer = replace(spec(name), max_position_embeddings=4)
        text = CONFIGS[name]["text_config"] | {"max_position_embeddings": 4}
        assert families.patch_config(CONFIGS[name], longer) == CONFIGS[name] | {"text_config": text}
    flat = CONFIGS["Qwen2.5-VL-7B"]
    longer = replace(spec("Qwen2.5-VL-7B"), max_position_embeddings=4)
    assert families.patch_config(flat, longer) == flat | {"max_position_embeddings": 4}


VL = CONFIGS["Qwen3-VL-4B"]["text_config"]
REFUSED = [
    ("SmolLM3-3B", {"no_rope_layers": [1, 0]}, r"no_rope_layers=\[1, 0\] must have a 0 .* for each of the 36 layers"),
    ("SmolLM3-3B", {"no_rope_layers": None, "no_rope_layer_interval": 0}, r"no_rope_layer_interval=0 must be 1 or"),
    ("SmolLM3-3B", {"layer_types": ["sliding_attention"] * 36}, r"use_sliding_window=False and sliding_window=None"),
    ("Command-R7B", {"use_parallel_block": False}, r"use_parallel_block=False of a cohere2 model is not supported"),
    ("Command-R7B", {"position_embedding_type": "rope"}, r"position_embedding_type='rope' of a cohere2 model"),
    ("Command-R7B", {"layer_switch": 5}, r"sliding_window_pattern=4 and layer_switch=5 of a cohere2 model"),
    ("Granite-3.0-8B", {"logits_scaling": 0}, r"logits_scaling=0 of a granite model must be above 0"),
    ("Granite-3.0-8B", {"hidden_act": "gelu"}, r"hidden_act='gelu' of a granite model is not supported, only 'silu'"),
    ("starcoder2-7b", {"mlp_type": "gated"}, r"mlp_type='gated' of a starcoder2 model is not supported"),
    (
        "starcoder2-7b",
        {"hidden_act": "mish"},
        r"hidden_act='mish' of a starcoder2 model is not supported; kumi supports",
    ),
    ("GLM-4.5-Air", {"n_shared_experts": 0}, r"n_shared_experts=0 1 or more"),
    ("GLM-4.5-Air", {"first_k_dense_replace": 47}, r"first_k_dense_replace=47 must be 0 to num_hidden_layers=46"),
    ("GLM-4.5-Air", {"num_mtp_layers": 2}, r"num_nextn_predict_layers=1 and num_mtp_layers=2 of a glm4_moe model"),
    ("Qwen/Qwen1.5-MoE-A2.7B", {"use_sliding_window": True}, r"use_sliding_window=True of a qwen2_moe model is not"),
    ("Qwen/Qwen3-Coder-30B-A3B-Instruct", {"use_qk_norm": False}, r"use_qk_norm=False of a qwen3_moe model is not"),
    ("microsoft/Phi-4-mini-instruct", {"lm_head_bias": True}, r"lm_head_bias=True of a phi3 model is not supported"),
    ("google/gemma-7b", {"hidden_activation": "gelu"}, r"hidden_act='gelu\S*' and hidden_activation='gelu' of a gemma"),
    ("allenai/Olmo-3-7B-Instruct", {"rope_parameters": {"full_attention": {}}}, r"must have a table for each of sli"),
    ("GLM-4.5-Air", {"partial_rotary_factor": 0}, r"partial_rotary_factor, the share of .* in a glm4_moe model, is 0"),
    ("GLM-4.5-Air", {"num_experts_per_tok": 129}, r"num_experts_per_tok=129 is more than the 128 experts"),
    ("Qwen3-VL-4B", {"vocab_size": 3}, r"vocab_size=3 differs from 151936 in text_config; remove one of them"),
    (
        "Qwen3-VL-4B",
        {"text_config": VL | {"use_sliding_window": True}},
        r"use_sliding_window=True in text_config of a qwen3_vl model is not supported",
    ),
    ("Qwen3-VL-4B", {"text_config": VL | {"deepstack": 1}}, r"'deepstack' \(1\) is not a key that kumi knows"),
    (
        "gemma-3-4b",
        {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3"},
        r"model_type='gemma3_text' of the text_config of a mistral3 model is not supported; kumi supports",
    ),
    ("Qwen2.5-VL-7B", {"audio_config": {}}, r"'audio_config' .* is not a key that kumi knows"),
]


@pytest.mark.parametrize(
    ("name", "change", "words"), REFUSED, ids=[f"{row[0]}-{next(iter(row[1]))}" for row in REFUSED]
)
def test_what_is_not_understood_is_refused_in_a_sentence(name, change, words):
    with pytest.raises(ModelError, match=words):
        spec(name, **change)


def test_a_model_that_sees_has_a_vision_config():
    config = {key: value for key, value in CONFIGS["gemma-3-4b"].items() if key != "vision_config"}
    with pytest.raises(ModelError, match="'vision_config' is missing; a gemma3 model needs one"):
        families.from_hf(config)


def test_a_model_that_sees_with_nothing_is_not_written():
    with pytest.raises(ModelError, match="this qwen3_vl model has no configuration of its vision parts"):
        families.to_hf(replace(spec("Qwen3-VL-4B"), carried_config=""))


def test_a_ministral_with_windows_and_none():
    config = {**CONFIGS["Ministral-8B"], "model_type": "ministral", "architectures": ["MinistralForCausalLM"]}
    mixed = families.from_hf(config | {"layer_types": ["full_attention", "sliding_attention"] * 18})
    assert [layer.window for layer in mixed.layers[:2]] == [None, 32768]
    with pytest.raises(ModelError, match="has sliding_attention, but sliding_window is null"):
        families.from_hf(config | {"layer_types": ["sliding_attention"] * 36, "sliding_window": None})


def test_queries_that_grow():
    table = {
        "type": "yarn",
        "rope_theta": 1e6,
        "factor": 16.0,
        "original_max_position_embeddings": 16384,
        "max_position_embeddings": 262144,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    }
    config = {key: value for key, value in CONFIGS["Ministral-8B"].items() if key not in ("rope_theta", "rope_scaling")}
    config |= {"model_type": "ministral3", "architectures": ["Ministral3ForCausalLM"], "rope_parameters": table}
    read = families.from_hf(config)
    turned = read.layers[0].attention.rope
    assert (turned.query_growth, turned.attention_factor, turned.key_rope.query_growth) == (0.1, 1.0, 0.0)
    assert families.from_hf(families.to_hf(read)) == read
    for change in ({"type": "default"}, {"llama_4_scaling_beta": -1}):
        with pytest.raises(ModelError, match=r"of a ministral3 model must be YaRN's|is not a key that kumi knows"):
            families.from_hf(config | {"rope_parameters": table | change})


def test_a_model_that_its_family_has_no_words_for_is_not_written():
    olmo = spec("OLMo-2-7B")
    with pytest.raises(ModelError, match=r"cannot be written as a olmo2 config\.json"):
        families.to_hf(replace(olmo, layers=tuple(replace(layer, pre_norms=True) for layer in olmo.layers)))
