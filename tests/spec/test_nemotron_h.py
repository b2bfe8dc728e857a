"""Nemotron-H's config.json in all its spellings, and the layouts and exports that its models do not support."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from kumi.errors import ModelError
from kumi.export import TRAINERS
from kumi.plan.estimate import estimate
from kumi.plan.layout_batch import batch_layouts
from kumi.plan.search.candidates import legal_mask
from kumi.spec import families
from kumi.spec.checks import illegal
from kumi.spec.layout import Layout
from kumi.spec.ledger import active_params, num_params
from kumi.spec.model import Attention, LayerSpec, Mamba, MoE
from planned import job_of

_BOTH = {
    "architectures": ["NemotronHForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "chunk_size": 128,
    "conv_kernel": 4,
    "expand": 2,
    "head_dim": 128,
    "hidden_dropout": 0.0,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "mamba_hidden_act": "silu",
    "mamba_proj_bias": False,
    "mlp_bias": False,
    "mlp_hidden_act": "relu2",
    "model_type": "nemotron_h",
    "n_groups": 8,
    "num_logits_to_keep": 1,
    "pad_token_id": 0,
    "rescale_prenorm_residual": True,
    "residual_in_fp32": False,
    "sliding_window": None,
    "ssm_state_size": 128,
    "tie_word_embeddings": False,
    "time_step_floor": 0.0001,
    "time_step_limit": [0.0, inf],
    "time_step_max": 0.1,
    "time_step_min": 0.001,
    "torch_dtype": "bfloat16",
    "use_bias": False,
    "use_cache": True,
    "use_conv_bias": True,
    "use_mamba_kernels": True,
    "vocab_size": 131072,
}
NANO_9B = _BOTH | {
    "eos_token_id": 12,
    "hidden_size": 4480,
    "intermediate_size": 15680,
    "mamba_head_dim": 80,
    "mamba_num_heads": 128,
    "hybrid_override_pattern": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
    "num_hidden_layers": 56,
    "max_position_embeddings": 131072,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
}
NANO_30B = _BOTH | {
    "eos_token_id": 2,
    "hidden_size": 2688,
    "intermediate_size": 1856,
    "mamba_head_dim": 64,
    "mamba_num_heads": 64,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "num_hidden_layers": 52,
    "mamba_ssm_cache_dtype": "float32",
    "max_position_embeddings": 262144,
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "n_group": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_eps": 1e-05,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts_per_tok": 6,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 1.0,
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "topk_group": 1,
}


@pytest.mark.parametrize(("config", "count"), [(NANO_9B, 8_888_227_328), (NANO_30B, 31_577_937_344)])
def test_published_models(config, count):
    spec = families.from_hf(config)
    assert num_params(spec) == count
    assert families.from_hf(families.to_hf(spec)) == spec
    assert families.patch_config(config, spec) == config


def test_three_billion_of_thirty_are_active():
    assert 3.2e9 < active_params(families.from_hf(NANO_30B)) < 3.6e9


def test_kinds_of_layers_in_words():
    """Both the words of transformers 5 and the earlier ones are read."""
    spec = families.from_hf(NANO_30B)
    for words in (("linear_attention", "full_attention"), ("mamba", "attention")):
        word = {"M": words[0], "*": words[1], "E": "moe", "-": "mlp"}
        kinds = [word[letter] for letter in NANO_30B["hybrid_override_pattern"]]
        rest = {key: value for key, value in NANO_30B.items() if key != "hybrid_override_pattern"}
        assert families.from_hf(rest | {"layers_block_type": kinds}) == spec


def test_the_parts():
    mamba, experts, attention = (families.from_hf(NANO_30B).layers[index] for index in (0, 1, 5))
    assert mamba == LayerSpec(Mamba(64, 64, 128, 8, 4, 128, time_step_limit=(0.001, inf)), None)
    assert attention == LayerSpec(Attention(32, 2, 128, None), None)
    assert isinstance(experts.mlp, MoE)
    assert (experts.attention, experts.mlp.gated, experts.mlp.hidden_act) == (None, False, "relu2")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hybrid_override_pattern": "MX"}, "letters M, "),
        ({"hybrid_override_pattern": ""}, "give one of them"),
        ({"layers_block_type": ["mamba", "rnn"]}, "linear_attention"),
        ({"num_hidden_layers": 3}, "num_hidden_layers=3, but 52 layer types are given"),
        ({"n_groups": 7}, "n_groups=7 does not divide mamba_num_heads=64"),
        ({"moe_latent_size": 64}, "moe_latent_size=64"),
        ({"num_nextn_predict_layers": 1}, "multi-token prediction"),
        ({"mlp_bias": True}, "mlp_bias=True"),
        ({"n_shared_experts": 2}, "n_shared_experts=2"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"attention_head_dim": 64}, "attention_head_dim=64 and head_dim=128"),
        ({"sliding_window": 8}, "sliding_window=8"),
        ({"mamba_hidden_act": "gelu"}, "mamba_hidden_act='gelu'"),
        ({"ssm_state_size": 0}, "ssm_state_size=0 must be 1 or more"),
        ({"mamba_d_ssm": 3}, "mamba_d_ssm"),
    ],
)
def test_what_is_refused(change, words):
    with pytest.raises(ModelError, match=r"config\.json") as caught:
        families.from_hf(NANO_30B | change)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (
            Layout(cp=2),
            "cp=2 splits sequences, but the state of the model's Mamba layers runs through the complete sequence; "
            "set cp = 1",
        ),
        (Layout(tp=16), "tp=16 does not divide n_groups=8; set tp = 1, 2, 4 or 8"),
    ],
)
def test_layouts_that_are_refused(layout, words):
    job = job_of(families.from_hf(NANO_9B), seq_len=4096, sequences=8)
    job = replace(job, cluster=replace(job.cluster, devices_per_node=layout.world_size, nodes=1))
    assert words in illegal(job.model, layout, job.cluster, job.batch)
    assert not legal_mask(job, batch_layouts([layout]))[0]


def test_a_plan_counts_every_kind_of_layer():
    job = job_of(families.from_hf(NANO_30B), seq_len=4096, sequences=8)
    estimated = estimate(job, Layout(dp_shard=8, zero=3, ep=8))
    assert estimated.step_seconds > 0
    assert max(one.total for one in estimated.memory) > 31_577_937_344 * 16 / 8


@pytest.mark.parametrize("name", TRAINERS)
def test_exports_of_one_kind_of_layer_refuse(name):
    """Exports that leave the model to transformers do not describe it, so they do not refuse."""
    job = job_of(families.from_hf(NANO_9B), seq_len=4096, sequences=8)
    reasons = " ".join(TRAINERS[name].unsupported(job, Layout(dp_shard=8, zero=3)))
    described = name in ("megatron-lm", "megatron-bridge", "torchtitan", "nanotron")
    assert ("not attention with an mlp each" in reasons) == described
