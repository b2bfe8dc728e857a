"""Families and their models: reading, parameter counts, errors."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from published_models import EXAMPLES, PLANNED, PUBLISHED

from kumi.errors import ModelError
from kumi.spec import families
from kumi.spec.ledger import active_params, num_params
from kumi.spec.model import MLP, LatentAttention, MoE

MODELS = Path(__file__).parents[2] / "examples" / "models"
DEEPSEEK = families.read_config(MODELS / "deepseek-v3")
MIXTRAL = families.read_config(MODELS / "mixtral-8x7b")
QWEN = families.read_config(MODELS / "qwen3-30b-a3b")
BLOOM = families.read_config(MODELS / "bloom-176b")


@pytest.mark.parametrize("name", PLANNED)
def test_published_parameter_counts(name):
    config, count = PLANNED[name]
    assert num_params(families.from_hf(config)) == count


def test_every_example_is_counted():
    assert sorted(EXAMPLES) == sorted(folder.name for folder in MODELS.iterdir())


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_have_the_published_parameter_counts(name):
    spec, (total, active) = families.from_hf(families.read_config(MODELS / name)), EXAMPLES[name]
    assert num_params(spec) == total
    assert active_params(spec) == (active or total)


def test_layers_of_deepseek():
    spec = families.from_hf(DEEPSEEK)
    (dense, routed), of_layer = spec.unique_layers()
    assert of_layer == (0,) * 3 + (1,) * 58
    assert dense.mlp == MLP(18432)
    assert isinstance(routed.mlp, MoE)
    assert (routed.mlp.scoring_func, routed.mlp.n_group, routed.mlp.shared_intermediate_size) == ("sigmoid", 8, 2048)
    assert dense.attention == routed.attention
    assert isinstance(dense.attention, LatentAttention)
    assert spec.notes[0].startswith(
        "model.layers.61.* are layers for multi-token prediction: passthrough tensors, copied unchanged"
    )
    assert spec.weights.passthrough == ("model.layers.61.",)


def test_notes_do_not_make_another_model():
    spec = families.from_hf(DEEPSEEK)
    assert replace(spec, notes=()) == spec


def test_dense_layers_among_those_with_experts():
    spec = families.from_hf(QWEN | {"decoder_sparse_step": 2, "mlp_only_layers": [1, 2]})
    sparse = [index for index, layer in enumerate(spec.layers) if isinstance(layer.mlp, MoE)]
    assert sparse == list(range(3, 48, 2))


def test_windows():
    gpt_oss, gemma = (families.from_hf(PLANNED[name][0]).layers for name in ("gpt-oss-20b", "gemma-3-1b"))
    assert [layer.attention.sliding_window for layer in gpt_oss[:4]] == [128, None] * 2
    assert [layer.attention.sliding_window for layer in gemma[:7]] == [512] * 5 + [None, 512]
    assert [layer.attention.rope.rope_theta for layer in gemma[4:6]] == [1e4, 1e6]


def test_a_part_of_every_head_may_be_turned():
    config = PLANNED["GPT-NeoX-20B"][0]
    assert families.from_hf(config).layers[0].attention.rotary_dim == 24
    table = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    with pytest.raises(ModelError, match=r"share of each head .* is 0\.\d+ and 0\.\d+; give one number"):
        families.from_hf(config | {"rope_parameters": table})
    bare = {key: value for key, value in config.items() if key != "rotary_pct"}
    assert families.from_hf(bare | {"rope_parameters": table}).layers[0].attention.rotary_dim == 48


REFUSED = [
    (MIXTRAL, {"num_experts_per_tok": 9}, r"num_experts_per_tok=9 is more than the 8 experts"),
    (MIXTRAL, {"num_local_experts": 0}, r"num_local_experts=0 must be 1 or more"),
    (MIXTRAL, {"num_local_expert": 8}, r"not a key that kumi knows for a mixtral model; did you mean 'num_local"),
    (
        QWEN,
        {"num_local_experts": 64},
        r"num_experts=128 and num_local_experts=64 of a qwen3_moe model; set exactly one",
    ),
    (QWEN, {"mlp_only_layers": [48]}, r"mlp_only_layers=\[48\] must be layer indices from 0 to 47"),
    (QWEN, {"decoder_sparse_step": 0}, r"decoder_sparse_step=0 must be 1 or more"),
    (DEEPSEEK, {"moe_layer_freq": 2}, r"moe_layer_freq=2 of a deepseek_v3 model is not supported, only 1"),
    (DEEPSEEK, {"scoring_func": "softmax"}, r"scoring_func='softmax' of a deepseek_v3 model is not supported"),
    (DEEPSEEK, {"seq_aux": False}, r"seq_aux=False of a deepseek_v3 model is not supported"),
    (DEEPSEEK, {"topk_group": 1, "n_group": 64}, r"topk_group=1 groups of 4 experts are fewer than num_exp"),
    (DEEPSEEK, {"n_group": 256, "topk_group": 8}, r"n_group=256 leaves one expert per group"),
    (DEEPSEEK, {"aux_loss_alpha": -0.1}, r"aux_loss_alpha=-0\.1 must not be negative"),
    (PLANNED["DeepSeek-V2"][0], {"topk_method": "noaux_tc"}, r"topk_method='noaux_tc' .* supports greedy, group_lim"),
    (PLANNED["DeepSeek-V2"][0], {"norm_topk_prob": True}, r"norm_topk_prob=True of a deepseek_v2 model is not supp"),
    (MIXTRAL, {"router_jitter_noise": 0.1}, r"router_jitter_noise=0\.1 of a mixtral model is not supported, only 0"),
    (DEEPSEEK, {"num_key_value_heads": 64}, r"num_key_value_heads=64 .* must be num_attention_heads=128"),
    (DEEPSEEK, {"n_group": 7}, r"n_group=7 must divide the 256 experts"),
    (DEEPSEEK, {"topk_group": 9}, r"topk_group=9 be at most n_group"),
    (DEEPSEEK, {"n_shared_experts": -1}, r"n_shared_experts=-1 must not be negative"),
    (DEEPSEEK, {"first_k_dense_replace": 62}, r"first_k_dense_replace=62 must be from 0 to num_hidden_layers=61"),
    (DEEPSEEK, {"qk_rope_head_dim": 63}, r"qk_rope_head_dim=63 is odd"),
    (PLANNED["gpt2"][0], {"n_head": 7}, r"num_attention_heads=7 does not divide hidden_size=768"),
    (PLANNED["gpt2"][0], {"activation_function": "mish"}, r"activation_function='mish' .* kumi supports silu"),
    (BLOOM, {"n_embed": 1024}, r"hidden_size=14336 and n_embed=1024 of a bloom model; give one"),
    (PLANNED["gemma-3-1b"][0], {"rope_parameters": {"rope_theta": 1.0}}, r"must have a table for each of sliding"),
    (PLANNED["gpt-oss-20b"][0], {"layer_types": ["full_attention"]}, r"1 entries for num_hidden_layers=24"),
    (PLANNED["falcon-7b"][0], {"num_ln_in_parallel_attn": 2}, r"num_ln_in_parallel_attn=2 .* must be 1"),
    (PLANNED["falcon-7b"][0], {"new_decoder_architecture": True, "parallel_attn": False}, r"contradict each other"),
    (PLANNED["phi-4"][0], {"rope_scaling": {"type": "longrope"}}, r"'short_factor', 'long_factor' are missing"),
    (
        PLANNED["phi-4"][0],
        {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
        r"short_factor of a phi3 model has 1 numbers for 64 pairs",
    ),
    (
        PLANNED["phi-4"][0],
        {"rope_scaling": {"type": "longrope", "short_factor": [0.0], "long_factor": [1.0]}},
        r"short_factor=\[0\.0\] of the rotary embedding must be numbers above 0",
    ),
    (PLANNED["gemma-3-1b"][0], {"query_pre_attn_scalar": 0}, r"query_pre_attn_scalar=0 of a gemma model must be above"),
    (PLANNED["gpt-oss-20b"][0], {"swiglu_limit": 0.0}, r"swiglu_limit=0\.0 of a gpt_oss model must be above 0"),
]


@pytest.mark.parametrize(("config", "change", "words"), REFUSED, ids=[str(next(iter(row[1]))) for row in REFUSED])
def test_what_is_not_understood_is_refused_in_a_sentence(config, change, words):
    with pytest.raises(ModelError, match=words):
        families.from_hf(config | change)


TRAINED = {name: config for name, (config, _) in (PUBLISHED | PLANNED).items()}
TRAINED |= {"DeepSeek-V3": DEEPSEEK, "Mixtral-8x7B": MIXTRAL, "Qwen3-30B-A3B": QWEN}


@pytest.mark.parametrize("name", TRAINED)
def test_what_can_be_trained_passes_and_is_written_as_it_was_read(name):
    spec = families.from_hf(TRAINED[name])
    families.check_trainable(spec)
    assert families.from_hf(families.to_hf(spec)) == spec
    assert families.patch_config(TRAINED[name], spec) == TRAINED[name]


LLAMA = families.from_hf(PUBLISHED["Llama-3.1-8B"][0])


def test_sinks_are_trained_but_no_config_of_a_trained_family_has_them():
    layers = tuple(replace(layer, attention=replace(layer.attention, sinks=True)) for layer in LLAMA.layers)
    families.check_trainable(replace(LLAMA, layers=layers))
    with pytest.raises(ModelError, match=r"this model cannot be written as a llama config\.json"):
        families.to_hf(replace(LLAMA, layers=layers))


def test_the_page_on_models_says_the_same():
    page = (MODELS.parents[1] / "docs" / "models.md").read_text()
    table = page.partition("| family")[2].partition("\n\n")[0]
    assert sorted(re.findall(r"^\| `(\w+)` \|", table, re.M)) == sorted(families.FAMILIES)
    for name, counts in EXAMPLES.items():
        row = next(line for line in page.splitlines() if line.startswith("|") and f"`{name}`" in line)
        assert all(count is None or f"{count / 1e9:.1f} B" in row for count in counts), name
