"""A model with experts from run file to Hugging Face folder: both ways of balancing, and the checkpoint's tensors."""

import contextlib
import shutil

import pytest
import torch
from tests.train.conftest import back_to, losses, metrics, run_file
from transformers import AutoModelForCausalLM

import kumi
from kumi.cli import main
from kumi.storage import checkpoint

CONFIG = {
    "model_type": "deepseek_v3",
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "aux_loss_alpha": 0.01,
}
BIAS = "model.layers.2.mlp.gate.e_score_correction_bias"


def train(folder, *overrides, **model):
    section = {"init": "random", "config": CONFIG, **model}
    with contextlib.chdir(folder):
        return main(["train", str(run_file(folder, model=section)), *overrides])


@pytest.fixture
def folder(small, tmp_path):
    folder = small.copy(tmp_path)
    shutil.rmtree(folder / "run")
    return folder


def test_a_model_with_experts_is_trained_resumed_and_exported(folder):
    assert train(folder, "layout.microbatch=4") == 0
    out = folder / "run"
    first, entries = losses(out), [entry for entry in metrics(out) if "train/loss" in entry]
    assert first[6] < first[1] - 0.5
    assert all(entry["train/aux_loss"] == 0.0 and entry["train/busiest_expert"] >= 1.0 for entry in entries)
    bias = checkpoint.open(out / "checkpoints" / "step_000006").read(f"model/{BIAS}")
    # Six steps of 0.001, up or down or not at all.
    assert bias.abs().max() > 0
    torch.testing.assert_close(bias * 1000, (bias * 1000).round())
    theirs, ours = AutoModelForCausalLM.from_pretrained(out / "hf"), kumi.load_decoder(out / "hf")
    assert torch.equal(dict(theirs.named_buffers())[BIAS], bias)
    ids = torch.arange(20)[None]
    assert (theirs(ids).logits - ours(ids)).abs().max() <= 1e-5

    back_to(out, 2)
    assert train(folder, "layout.microbatch=4") == 0
    assert losses(out) == first
    assert torch.equal(checkpoint.open(out / "checkpoints" / "step_000006").read(f"model/{BIAS}"), bias)


def test_the_auxiliary_loss_is_reported_and_does_not_depend_on_microbatches(folder):
    results = []
    for size in (2, 8):
        # Every sequence for itself, so that it does not matter which go together.
        assert train(folder, f"layout.microbatch={size}", "export.enabled=false", "train.steps=3", balance="aux") == 0
        results.append([entry for entry in metrics(folder / "run") if "train/loss" in entry])
        shutil.rmtree(folder / "run")
    for record, other in zip(*results, strict=True):
        # A sequence's loss is 1 when its experts are equally busy.
        assert record["train/aux_loss"] == pytest.approx(0.01, rel=0.3)
        for key in ("train/loss", "train/aux_loss", "train/grad_norm"):
            assert record[key] == pytest.approx(other[key], rel=2e-4)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (
            {"balance": "aux", "balance_coef": 0.0},
            "model.balance='aux' with a loss of weight 0, from model.balance_coef or the config.json of this",
        ),
        (
            {
                "balance": "loss-free",
                "config": {
                    "model_type": "mixtral",
                    **{
                        key: CONFIG[key]
                        for key in (
                            "vocab_size",
                            "hidden_size",
                            "intermediate_size",
                            "num_hidden_layers",
                            "num_attention_heads",
                            "max_position_embeddings",
                            "rms_norm_eps",
                        )
                    },
                    "num_key_value_heads": 2,
                },
            },
            "needs a router with a correction bias, and this mixtral model has none; set model.balance = 'aux'",
        ),
        ({"balance": "maybe"}, "auto"),
    ],
)
def test_what_is_refused(folder, capsys, model, words):
    assert train(folder, **model) == 2
    assert words in capsys.readouterr().err


def test_a_dense_model_has_nothing_to_balance(folder, capsys):
    with contextlib.chdir(folder):
        assert main(["train", str(run_file(folder)), "model.balance=aux"]) == 2
    assert "balances routed experts, and this llama model has none; remove both" in capsys.readouterr().err
