"""Peak memory of a train step on the GPU, beside the estimate made before it."""

from __future__ import annotations

import gc

import pytest
import shapes
import torch

from kumi.train.step import StepBatch, train_step
from kumi.train.train_state import TrainState
from kumi.validation.random_run import make_rank_state, synthetic

# 134 M parameters with activations of about the states' size, so that neither hides the other's error.
CONFIG = shapes.TINY | {
    "vocab_size": 16384,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 2048,
}
SEQ_LEN, ROWS = 2048, 4


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_the_estimate_is_near_the_measured_peak(precision, recompute, device):
    if device.type != "cuda":
        pytest.skip("only CUDA's allocator counts its peak")
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    parts = make_rank_state(
        CONFIG, device, seq_len=SEQ_LEN, microbatch=ROWS, recompute=recompute, compile=False, precision=precision
    )
    data, state = synthetic(ROWS, SEQ_LEN, CONFIG["vocab_size"], documents=1), TrainState()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        train_step(parts, state, StepBatch(data, *[data["labels"].size] * 2, None, 0.0), None)
    measured = torch.cuda.max_memory_allocated() - before
    assert measured == pytest.approx(parts.run.memory.total - parts.run.memory.reserved, rel=0.2)
