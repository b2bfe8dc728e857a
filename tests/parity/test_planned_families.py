"""Families that are planned for but not trained, against transformers: parameter names, shapes, FLOPs."""

from __future__ import annotations

import pytest
import torch
import transformers
from tiny_models import SIZES
from torch.utils.flop_counter import FlopCounterMode

from kumi.convert.hf import entries
from kumi.errors import ModelError
from kumi.nn import Decoder
from kumi.spec import families, ledger
from kumi.spec.families import generic
from kumi.spec.weights import files

# What a family has no word for; its other sizes it has under names of its own.
WITHOUT = {
    "GPT2": ("intermediate_size", "num_key_value_heads"),
    "GPTNeoX": ("num_key_value_heads",),
    "Falcon": ("intermediate_size", "num_key_value_heads"),
    "Bloom": ("intermediate_size", "num_key_value_heads", "max_position_embeddings"),
}
TOKENS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}

CASES = {
    "gpt2": ("GPT2", {}),
    "gpt2-wide": ("GPT2", {"n_inner": 40, "tie_word_embeddings": False, "activation_function": "relu"}),
    "gpt-neox": ("GPTNeoX", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}}),
    "gpt-neox-in-turn": ("GPTNeoX", {"use_parallel_residual": False, "attention_bias": False, "rotary_pct": 1.0}),
    "bloom": ("Bloom", {}),
    "falcon": ("Falcon", {}),
    "falcon-groups": ("Falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon-in-turn": ("Falcon", {"parallel_attn": False, "multi_query": False, "alibi": True, "bias": True}),
    "gpt-oss": ("GptOss", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 5}),
    "phi3": ("Phi3", {}),
    "gemma2": ("Gemma2", {"head_dim": 16, "sliding_window": 5}),
    "gemma3": ("Gemma3Text", {"head_dim": 16, "sliding_window": 5, "num_hidden_layers": 7}),
}  # fmt: skip


def reference(name, device):
    """transformers' model of the case. Experts and heads are computed in products that PyTorch's counter knows."""
    family, changes = CASES[name]
    sizes = {key: value for key, value in SIZES.items() if key not in WITHOUT.get(family, ())}
    config = getattr(transformers, f"{family}Config")(**sizes | TOKENS | changes)
    config._attn_implementation = config._experts_implementation = "eager"
    kind = {"GPT2": "GPT2LMHeadModel", "Gemma3Text": "Gemma3ForCausalLM"}.get(family, f"{family}ForCausalLM")
    with torch.device(device):
        return getattr(transformers, kind)(config)


@pytest.mark.parametrize("name", CASES)
def test_names_and_shapes(name, tmp_path):
    """Those of the file that transformers saves."""
    theirs = reference(name, "cpu")
    theirs.save_pretrained(tmp_path)
    spec = families.from_hf(theirs.config.to_dict())
    listed = {name: pieces[0].part.shape for name, pieces in files(spec).items()}
    assert listed == {key: entry.shape for key, entry in entries(tmp_path).items()}


@pytest.mark.parametrize("name", CASES)
def test_flops_of_the_forward_pass(name):
    theirs = reference(name, "cpu").eval()
    spec = families.from_hf(theirs.config.to_dict())
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        theirs(input_ids=torch.zeros(2, 24, dtype=torch.int64), use_cache=False)
    assert counter.get_total_flops() == ledger.forward_flops(spec, tokens=48, seq_len=24)


def test_what_is_only_planned_for_is_not_built():
    spec = generic.gpt(layers=2, hidden=32, heads=4, vocab=97, seq_len=64)
    with pytest.raises(ModelError, match="a gpt model can be planned for but not trained: this version trains"):
        Decoder(spec, device="meta")
