"""The recurrence by the package mamba-ssm: kumi's arguments, with a stand-in for the package, which needs a GPU."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

from kumi.nn.mamba_scan import ScanInputs, scan
from kumi.nn.numerics import use_kernels

ROWS, LENGTH, HEADS, CHANNELS, GROUPS, STATE, CHUNK = 2, 21, 4, 3, 2, 5, 16


def combined(x, dt, A, B, C, chunk_size, D=None, dt_bias=None, seq_idx=None, dt_softplus=False, dt_limit=(0.0, 1.0)):
    """Compute what the package documents, position by position: its rate is A, and documents are numbered in int32."""
    assert dt_softplus
    assert chunk_size == CHUNK
    assert seq_idx is None or seq_idx.dtype == torch.int32
    steps = F.softplus(dt + dt_bias).clamp(*dt_limit)
    b, c = (value.repeat_interleave(HEADS // GROUPS, dim=2) for value in (B, C))
    state, outputs = x.new_zeros(ROWS, HEADS, CHANNELS, STATE), []
    for place in range(x.shape[1]):
        step = steps[:, place, :, None, None]
        decay = (A[:, None, None] * step).exp()
        if seq_idx is not None and place:
            decay = decay * (seq_idx[:, place] == seq_idx[:, place - 1])[:, None, None, None]
        state = decay * state + step * x[:, place, :, :, None] * b[:, place, :, None]
        outputs.append((state * c[:, place, :, None]).sum(-1) + D[:, None] * x[:, place])
    return torch.stack(outputs, dim=1)


@pytest.fixture(autouse=True)
def _package(monkeypatch):
    names = ["mamba_ssm", "mamba_ssm.ops", "mamba_ssm.ops.triton", "mamba_ssm.ops.triton.ssd_combined"]
    for name in names:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules[names[-1]].mamba_chunk_scan_combined = combined
    monkeypatch.delitem(sys.modules, "kumi.nn.kernels.mamba_ssm_scan", raising=False)
    yield
    use_kernels(())
    sys.modules.pop("kumi.nn.kernels.mamba_ssm_scan", None)


@pytest.mark.parametrize("documents", [False, True])
def test_equal_to_the_plain_path(documents, monkeypatch):
    random = torch.Generator().manual_seed(0)

    def leaf(*sizes):
        return torch.randn(sizes, generator=random, dtype=torch.float64).requires_grad_()

    numbers = torch.randint(0, 2, (ROWS, LENGTH), generator=random).cumsum(1) if documents else None
    projections = leaf(ROWS, LENGTH, HEADS, CHANNELS), *(leaf(ROWS, LENGTH, GROUPS, STATE) for _ in range(2))
    given = ScanInputs(
        *projections, leaf(ROWS, LENGTH, HEADS), *(leaf(HEADS) for _ in range(3)), numbers, CHUNK, 0.1, 2
    )
    expected = scan(given)
    grads = torch.autograd.grad(expected.square().sum(), given[:7])
    use_kernels((("scan", "mamba-ssm"),))
    # In float64, which the package does not compute, only the rate is rounded to float32.
    monkeypatch.setattr(sys.modules["kumi.nn.kernels.mamba_ssm_scan"], "takes", lambda inputs: True)
    result = scan(given)
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.autograd.grad(result.square().sum(), given[:7]), grads, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("chunk", "dtype"), [(8, torch.float32), (24, torch.float32), (16, torch.float64)])
def test_what_the_package_does_not_compute(chunk, dtype):
    use_kernels((("scan", "mamba-ssm"),))
    module = sys.modules["kumi.nn.kernels.mamba_ssm_scan"]
    x = torch.zeros(1, 4, 2, 3, dtype=dtype)
    assert not module.takes(ScanInputs(x, *[x] * 6, None, chunk, 0.0, 1.0))
