"""Models of other families than Llama, from run file to a Hugging Face folder with which transformers agrees."""

import contextlib
import shutil

import pytest
import torch
from tests.train.conftest import losses, run_file
from transformers import AutoModelForCausalLM

import kumi
from kumi.cli import main

SIZES = {"vocab_size": 320, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
WIDE = {"intermediate_size": 64, "num_key_value_heads": 2, "max_position_embeddings": 64}
CONFIGS = {
    "gpt2": {"vocab_size": 320, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "gemma3_text": {
        **SIZES,
        **WIDE,
        "head_dim": 16,
        "sliding_window": 8,
        "query_pre_attn_scalar": 16,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "gpt_oss": {
        **SIZES,
        **WIDE,
        "head_dim": 16,
        "sliding_window": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rms_norm_eps": 1e-5,
    },
    "qwen2_moe": {
        **SIZES,
        **WIDE,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "decoder_sparse_step": 2,
    },
}


@pytest.mark.parametrize("family", CONFIGS)
def test_a_model_is_trained_and_exported(small, tmp_path, family):
    folder = small.copy(tmp_path)
    shutil.rmtree(folder / "run")
    config = {"model_type": family, **CONFIGS[family]}
    with contextlib.chdir(folder):
        assert main(["train", str(run_file(folder, model={"init": "random", "config": config}))]) == 0
    trained = losses(folder / "run")
    assert trained[6] < trained[1] - 0.3
    theirs = AutoModelForCausalLM.from_pretrained(folder / "run" / "hf")
    ids = torch.arange(20)[None]
    assert (theirs(ids).logits - kumi.load_decoder(folder / "run" / "hf")(ids)).abs().max() <= 1e-5
