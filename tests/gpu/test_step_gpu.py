"""kumi's train step on the GPU: recompute modes, precisions, compilation, a checkpoint and back."""

from __future__ import annotations

import math
from itertools import product

import pytest
import shapes
import torch

from kumi.data import Batch
from kumi.parallel.state_tensors import fill_pieces, model_pieces, optimizer_pieces
from kumi.storage import checkpoint
from kumi.train.step import StepBatch, train_step
from kumi.train.train_state import RankState, TrainState
from kumi.validation.random_run import make_rank_state, synthetic

SEQ_LEN, ROWS = 64, 4
PRECISIONS = ("bf16", "fp32", "fp16")
RECOMPUTE = ("none", "selective", "full")
# Losses and gradient norms of equal computations: kernels may add up in another order each time.
RTOL = {"bf16": 1e-2, "fp32": 1e-4, "fp16": 1e-2}


def parts_on(device: torch.device, precision: str, recompute: str = "none", compile: bool = False) -> RankState:
    """Equal weights every time."""
    parts = make_rank_state(
        shapes.TINY, device, seq_len=SEQ_LEN, microbatch=ROWS, recompute=recompute, compile=compile, precision=precision
    )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in parts.model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.05
            parameter.copy_(1 + noise if name.endswith("norm.weight") else noise)
    return parts


def batch() -> Batch:
    return synthetic(ROWS, SEQ_LEN, shapes.TINY["vocab_size"], documents=4)


def train(parts: RankState, steps: int) -> list[tuple[float, float]]:
    """Loss and gradient norm of every step."""
    data, state, trained = batch(), TrainState(), []
    tokens = int((data["labels"] >= 0).sum())
    counts = StepBatch(data, tokens, tokens, None, 0.0)
    for _ in range(steps):
        result = train_step(parts, state, counts, None)
        trained.append((result.loss.item(), result.grad_norm.item()))
    return trained


@pytest.mark.parametrize(("precision", "recompute"), list(product(PRECISIONS, RECOMPUTE)))
def test_a_step_is_that_of_float32_on_the_cpu(precision, recompute, device):
    expected = train(parts_on(torch.device("cpu"), "fp32"), 2)
    steps = train(parts_on(device, precision, recompute), 8 if precision == "fp16" else 2)
    # In float16 a step whose scaled gradients overflow changes nothing but the scale.
    first = next(index for index, (_, norm) in enumerate(steps) if math.isfinite(norm))
    assert all(loss == pytest.approx(steps[0][0]) for loss, _ in steps[: first + 1])
    steps = steps[first : first + 2]
    for (loss, norm), (expected_loss, expected_norm) in zip(steps, expected, strict=True):
        assert loss == pytest.approx(expected_loss, rel=RTOL[precision])
        assert norm == pytest.approx(expected_norm, rel=3 * RTOL[precision])
    assert steps[1][0] < steps[0][0]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # both come from inside torch's compiler
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_compiled_layers_train_the_same(recompute, device):
    plain = train(parts_on(device, "bf16", recompute), 3)
    compiled = train(parts_on(device, "bf16", recompute, compile=True), 3)
    assert [loss for loss, _ in compiled] == pytest.approx([loss for loss, _ in plain], rel=5e-3)


def test_a_checkpoint_holds_everything_bit_for_bit(device, tmp_path):
    parts = parts_on(device, "bf16")
    train(parts, 2)
    every = [*model_pieces(parts.model, parts.mesh), *optimizer_pieces(parts.model, parts.optimizer, parts.mesh)]
    saver = checkpoint.AsyncSaver()
    saver.save(tmp_path / "step_000002", every, {"step": 2})
    saved = {piece.name: piece.data.clone() for piece in every}
    after = train(parts, 1)  # the copy that is being written must not see this
    saver.wait()

    again = make_rank_state(
        shapes.TINY, device, seq_len=SEQ_LEN, microbatch=ROWS, recompute="none", compile=False, precision="bf16"
    )
    restored = [*model_pieces(again.model, again.mesh), *optimizer_pieces(again.model, again.optimizer, again.mesh)]
    fill_pieces(restored, checkpoint.open(tmp_path / "step_000002").read)
    assert {piece.name for piece in restored} == saved.keys()
    for piece in restored:
        assert piece.data.device == saved[piece.name].device
        assert torch.equal(piece.data, saved[piece.name]), piece.name
    assert train(again, 1)[0][0] == pytest.approx(after[0][0], rel=1e-6)
