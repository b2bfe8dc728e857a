"""Optimizers in one process agree with PyTorch's classes and with bitsandbytes' definitions."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kumi.parallel import build_mesh
from kumi.parallel.mesh import RankInfo
from kumi.parallel.optim import OPTIMIZERS
from kumi.parallel.optim.newton_schulz import orthogonalise
from kumi.parallel.optim.optimizer import TrainedParams
from kumi.parallel.optim.quantize_8bit import RowBlocks, dynamic_codebook
from kumi.spec.layout import Layout
from kumi.spec.op import Dim, Param
from kumi.spec.optim import Optim
from kumi.spec.optim_states import OPTIM_KINDS, QUANTIZED_BLOCK

CPU = torch.device("cpu")
LAYER = "model.layers.0."
EXPERTS, PAIR = Dim("experts", 3), Dim("ffn", 32, 2)


def dims(*sizes):
    return tuple(Dim(f"dim{place}", size) for place, size in enumerate(sizes))


PARAMS = (
    Param("model.embed_tokens.weight", dims(60, 90)),
    Param(f"{LAYER}up_proj.weight", dims(40, 24)),
    Param(f"{LAYER}down_proj.weight", dims(24, 300)),
    Param(f"{LAYER}norm.weight", dims(24)),
    Param(f"{LAYER}mlp.experts.gate_up_proj", (EXPERTS, PAIR, *dims(24))),
    Param(f"{LAYER}mlp.experts.down_proj", (EXPERTS, *dims(24, 16))),
    Param(f"{LAYER}mlp.experts.down_proj_bias", (EXPERTS, *dims(24))),
)


def start(dtype=torch.float32):
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(param.shape, dtype=dtype) * 0.1) for param in PARAMS]


def gradients(step, dtype=torch.float32):
    torch.manual_seed(step + 1)
    return [torch.randn(param.shape, dtype=dtype) * 0.01 for param in PARAMS]


def trained(kind, steps=3, dtype=torch.float32, **options):
    """The parameters after some steps of ours."""
    mesh = build_mesh(Layout(), RankInfo(0, 1, 0, CPU))
    parameters = start(dtype)
    optimizer = OPTIMIZERS[kind](TrainedParams(tuple(zip(PARAMS, parameters)), Optim(kind=kind, **options), mesh))
    for step in range(steps):
        for parameter, gradient in zip(parameters, gradients(step, dtype)):
            parameter.grad = gradient
        optimizer.step()
        optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in parameters)
    return parameters, optimizer


def pieces(param, tensor, *, halves=False):
    """The tensors of `param` that are one each to the optimizer: each expert's, and `halves` of a pair to Muon."""
    alone = list(tensor) if param.dims[0].name == "experts" else [tensor]
    return [half for one in alone for half in (one.chunk(2) if halves and PAIR in param.dims else [one])]


def by_pytorch(make, steps=3, dtype=torch.float32, *, halves=False):
    """The parameters after some steps of `make(param, pieces of it)`, an optimizer of PyTorch for each."""
    parameters = [
        [nn.Parameter(one.detach().clone()) for one in pieces(*both, halves=halves)]
        for both in zip(PARAMS, start(dtype))
    ]
    optimizers = [make(*both) for both in zip(PARAMS, parameters)]
    for step in range(steps):
        for param, split, gradient in zip(PARAMS, parameters, gradients(step, dtype)):
            for parameter, part in zip(split, pieces(param, gradient, halves=halves)):
                parameter.grad = part.clone()
        for optimizer in optimizers:
            optimizer.step()
    return parameters


def apart(ours, theirs):
    """The largest difference of each parameter."""
    return [
        (mine.flatten() - torch.cat([one.flatten() for one in split])).abs().max().item()
        for mine, split in zip(ours, theirs)
    ]


def test_every_kind_has_its_optimizer():
    assert set(OPTIMIZERS) == set(OPTIM_KINDS)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_is_that_of_pytorch(momentum):
    ours, optimizer = trained("sgd", lr=0.1, betas=(momentum, 0.95))
    theirs = by_pytorch(
        lambda param, split: torch.optim.SGD(split, lr=0.1, momentum=momentum, weight_decay=0.1 * param.decayed)
    )
    assert max(apart(ours, theirs)) < 1e-7
    assert {name for state in optimizer.state.values() for name in state} == (
        {"momentum_buffer"} if momentum else set()
    )


def _muon(param, split):
    options = {"lr": 0.01, "weight_decay": 0.1 * param.decayed}
    if not param.name.startswith(LAYER) or split[0].ndim == 1:
        return torch.optim.AdamW(split, betas=(0.9, 0.95), **options)
    return torch.optim.Muon(split, momentum=0.9, adjust_lr_fn="match_rms_adamw", **options)


def test_muon_is_that_of_pytorch_on_every_matrix_of_a_layer():
    """In bfloat16, in which single matrices and stacks of them are multiplied by different kernels."""
    ours, _ = trained("muon", lr=0.01)
    differences = apart(ours, by_pytorch(_muon, halves=True))
    stacked = [param.dims[0] == EXPERTS and param.decayed for param in PARAMS]
    assert max(value for value, several in zip(differences, stacked) if not several) < 1e-7
    assert max(differences) < 0.01 * 0.2 * 32**0.5 * 3 * 2**-6


def test_matrices_of_float64_are_orthogonalised_in_it():
    torch.manual_seed(0)
    matrices = torch.randn(2, 30, 20, dtype=torch.float64)
    orthogonal = orthogonalise(matrices)
    left, _, right = torch.linalg.svd(matrices, full_matrices=False)
    u, sizes, other = torch.linalg.svd(orthogonal, full_matrices=False)
    assert (sizes > 0.6).all()
    assert (sizes < 1.3).all()
    assert torch.allclose(u @ other, left @ right, atol=1e-9)
    assert torch.allclose(orthogonalise(matrices.mT), orthogonal.mT, atol=1e-12)
    assert torch.allclose(orthogonalise(matrices[0]), orthogonal[0], atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_adafactor_is_that_of_pytorch(dtype):
    ours, _ = trained("adafactor", lr=0.01, dtype=dtype)
    theirs = by_pytorch(
        lambda param, split: torch.optim.Adafactor(split, lr=0.01, weight_decay=0.1 * param.decayed), dtype=dtype
    )
    assert apart(ours, theirs) == pytest.approx([0.0] * len(PARAMS), abs=1e-7 if dtype == torch.float32 else 1e-9)


def test_dynamic_maps_are_those_of_bitsandbytes():
    """Values that its documentation and its tests of `create_dynamic_map` are computed from."""
    signed, unsigned = (dynamic_codebook(CPU, signed=signed).values for signed in (True, False))
    for values in (signed, unsigned):
        assert values.shape == (256,)
        assert (values.diff() > 0).all()
        assert values[-1] == 1
    assert signed[127] == 0
    assert torch.equal(signed[:127].flip(0), -signed[128:255])
    assert unsigned[0] == 0
    # The highest decade has 64 values of either sign, or 128; the lowest one, or two.
    width = 0.9 / 64
    assert signed[254].item() == pytest.approx(1 - width / 2)
    assert signed[128].item() == pytest.approx(0.55e-6)
    assert unsigned[254].item() == pytest.approx(1 - width / 4)
    assert unsigned[1:3].tolist() == pytest.approx([0.325e-6, 0.775e-6])


@pytest.mark.parametrize("signed", [True, False])
def test_codes_are_of_the_nearest_value_and_blocks_of_the_whole_row(signed):
    torch.manual_seed(0)
    rows = torch.randn(3, 700) * torch.logspace(-4, 1, 700)
    rows = rows if signed else rows.abs()
    whole = RowBlocks(0, 700, 3)
    scales = whole.largest(rows)
    assert scales.tolist() == [[part.abs().max().item() for part in row.split(QUANTIZED_BLOCK)] for row in rows]
    code = dynamic_codebook(CPU, signed=signed)
    codes, values = whole.encode(rows, scales, code), code.values
    scaled = rows / scales.repeat_interleave(QUANTIZED_BLOCK, 1)[:, :700]
    nearest = (scaled[..., None] - values).abs().argmin(-1)
    nearest -= signed * ((scaled < 0) & (nearest == 127)).long()
    assert torch.equal(codes.long(), nearest)
    decoded = whole.decode(codes, scales, code, torch.float32)
    assert torch.equal(decoded, values[nearest] * scales.repeat_interleave(QUANTIZED_BLOCK, 1)[:, :700])
    for first, last in ((0, 300), (300, 520), (520, 700)):
        part = RowBlocks(first, last - first, 3)
        assert torch.equal(part.encode(rows[:, first:last], scales, code), codes[:, first:last])
        assert torch.equal(part.decode(codes[:, first:last], scales, code, torch.float32), decoded[:, first:last])


def test_a_block_of_zeros_stays_zero():
    blocks, zeros = RowBlocks(0, 300, 2), torch.zeros(2, 300)
    code = dynamic_codebook(CPU, signed=True)
    codes = blocks.encode(zeros, blocks.largest(zeros), code)
    assert not blocks.decode(codes, blocks.largest(zeros), code, torch.float32).any()


def test_eight_bit_adamw_is_adamw_but_for_the_rounding_of_moments():
    ours, optimizer = trained("adamw-8bit", lr=0.01)
    theirs = by_pytorch(
        lambda param, split: torch.optim.AdamW(split, lr=0.01, betas=(0.9, 0.95), weight_decay=0.1 * param.decayed)
    )
    dtypes = {
        param.name: {name: value.dtype for name, value in optimizer.state[parameter].items()}
        for param, parameter in zip(PARAMS, ours)
    }
    quantised = {name for name, one in dtypes.items() if one["exp_avg"] == torch.uint8}
    assert quantised == {PARAMS[0].name, PARAMS[2].name}
    for param, value in zip(PARAMS, apart(ours, theirs)):
        assert value < (0.01 if param.name in quantised else 1e-7)
    # The first step reads no moment, and is AdamW's.
    assert (
        max(
            apart(
                trained("adamw-8bit", 1, lr=0.01)[0],
                by_pytorch(
                    lambda param, split: torch.optim.AdamW(
                        split, lr=0.01, betas=(0.9, 0.95), weight_decay=0.1 * param.decayed
                    ),
                    1,
                ),
            )
        )
        < 1e-7
    )


def test_rows_at_a_time_change_nothing():
    whole, optimizer = trained("adamw-8bit", 1)
    object.__setattr__(optimizer, "at_once", 700)
    for parameter, gradient in zip(whole, gradients(1)):
        parameter.grad = gradient
    optimizer.step()
    assert all(torch.equal(one, other) for one, other in zip(whole, trained("adamw-8bit", 2)[0]))


@pytest.mark.parametrize("kind", OPTIM_KINDS)
def test_parameters_without_a_gradient_stay(kind):
    parameters, optimizer = trained(kind, 1)
    before = [parameter.detach().clone() for parameter in parameters]
    parameters[1].grad = torch.ones_like(parameters[1])
    optimizer.step()
    assert [torch.equal(*both) for both in zip(before, parameters)] == [place != 1 for place in range(len(PARAMS))]
