"""Mamba mixers against their definition, position by position."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

import kumi.nn.mamba as mixers
import kumi.nn.mamba_scan as scans
from kumi.nn.attention.attention_context import AttentionContext
from kumi.nn.mamba import Convolution, GatedNorm, Mamba
from kumi.nn.mamba_scan import SCAN, SCAN_BACKWARD, ScanInputs, scan
from kumi.spec import model
from kumi.spec.ledger import layer_ops

ROWS, HEADS, CHANNELS, GROUPS, STATE, CHUNK = 2, 6, 5, 3, 4, 8
SPEC = model.Mamba(4, 6, 5, 2, 4, 7, bias=True)


def inputs(length, documents=False, chunk=CHUNK, limits=(0.3, 1.5)):
    random = torch.Generator().manual_seed(length)

    def leaf(*shape):
        return torch.randn(shape, generator=random, dtype=torch.float64).requires_grad_()

    numbers = (torch.rand(ROWS, length, generator=random) < 0.25).long().cumsum(1) if documents else None
    both = (ROWS, length, GROUPS, STATE)
    return ScanInputs(
        leaf(ROWS, length, HEADS, CHANNELS),
        leaf(*both),
        leaf(*both),
        leaf(ROWS, length, HEADS),
        leaf(HEADS),
        leaf(HEADS),
        leaf(HEADS),
        numbers,
        chunk,
        *limits,
    )


def one_by_one(given):
    """Return the outputs of the recurrence, computed step by step."""
    steps = F.softplus(given.dt + given.dt_bias).clamp(given.low, given.high)
    b, c = (value.repeat_interleave(HEADS // GROUPS, dim=2) for value in (given.b, given.c))
    state, outputs = given.x.new_zeros(ROWS, HEADS, CHANNELS, STATE), []
    for place in range(given.x.shape[1]):
        decay = torch.exp(-given.a_log.exp() * steps[:, place])
        if given.numbers is not None and place:
            decay = decay * (given.numbers[:, place] == given.numbers[:, place - 1])[:, None]
        written = (steps[:, place, :, None] * given.x[:, place])[..., None] * b[:, place, :, None]
        state = decay[..., None, None] * state + written
        outputs.append((state * c[:, place, :, None]).sum(-1) + given.d[:, None] * given.x[:, place])
    return torch.stack(outputs, dim=1)


@pytest.mark.parametrize("at_a_time", [1, 2**19])
@pytest.mark.parametrize(("length", "documents"), [(24, False), (21, False), (21, True), (5, True), (40, True)])
def test_the_recurrence(length, documents, at_a_time, monkeypatch):
    """Rows of full chunks, of less than a chunk, and with a shorter last chunk; one or all chunks at a time."""
    monkeypatch.setattr(scans, "SCORES_AT_ONCE", (at_a_time, at_a_time))
    given = inputs(length, documents)
    result, reference = scan(given), one_by_one(given)
    torch.testing.assert_close(result, reference, rtol=1e-10, atol=1e-12)
    weights = torch.randn(reference.shape, generator=torch.Generator().manual_seed(0), dtype=reference.dtype)
    for value, expected in zip(*(torch.autograd.grad((y * weights).sum(), given[:7]) for y in (result, reference))):
        torch.testing.assert_close(value, expected, rtol=1e-8, atol=1e-10)


def test_strong_decay_stays_finite():
    """With decays close to 0 per position: differences of large sums, in float32."""
    given = inputs(40, limits=(0.0, float("inf")))
    values = [value.detach().float() for value in given[:7]]
    strong = ScanInputs(*values[:4], values[4], values[5] + 6, values[6], *given[7:])
    exact = ScanInputs(*(value.double() for value in strong[:7]), *given[7:])
    leaves = [value.requires_grad_() for value in strong[:7]]
    result = scan(strong)
    torch.testing.assert_close(result, one_by_one(exact).float(), rtol=1e-5, atol=1e-5)
    assert all(torch.isfinite(grad).all() for grad in torch.autograd.grad(result.sum(), leaves))


@pytest.mark.parametrize("length", [24, 21])
def test_operations_are_those_that_run(length):
    """The operators' FLOP formulas agree with PyTorch's count and with the ledger."""
    given = inputs(length)
    grad = torch.ones_like(given.x)

    def counted(function, *arguments):
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            function(*arguments)
        return counter.get_total_flops()

    assert counted(SCAN, *given) == counted(scans._scan, *given)
    assert counted(SCAN_BACKWARD, grad, *given) == counted(scans._scan_backward, grad, *given)
    spec = model.Mamba(HEADS, CHANNELS, STATE, GROUPS, 4, CHUNK)
    of = model.ModelSpec("nemotron_h", 8, 8, (model.LayerSpec(spec, None),), 1e-5, 64)
    (op,) = (op for op in layer_ops(of, 0) if op.kind == "scan")
    assert op.forward_flops(ROWS * length, length) == counted(SCAN, *given)


@pytest.mark.parametrize("at_a_time", [1, 75, 2**20])
def test_convolution_and_gated_norm(at_a_time, monkeypatch):
    """Against PyTorch's own differentiation, some channels at a time."""
    monkeypatch.setattr(mixers, "ELEMENTS_AT_ONCE", (at_a_time, at_a_time))
    options = {"device": None, "dtype": torch.float64}
    random = torch.Generator().manual_seed(1)
    numbers = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 2], [0, 1, 2, 2, 2, 2, 2, 2, 2]])
    convolution, norm = Convolution(6, SPEC, **options), GatedNorm(6, 3, 1e-5, **options)
    for parameter in (*convolution.parameters(), *norm.parameters()):
        torch.nn.init.normal_(parameter, generator=random)
    x, gate = (torch.randn(2, 9, 6, generator=random, dtype=torch.float64).requires_grad_() for _ in range(2))

    def plain(x, gate):
        window = [F.pad(x, (0, 0, by, 0))[:, :9] for by in (3, 2, 1, 0)]
        same = [F.pad(numbers, (by, 0), value=-1)[:, :9] == numbers for by in (3, 2, 1, 0)]
        taps = convolution.weight[:, 0].T
        y = sum(part * mask[..., None] * tap for part, mask, tap in zip(window, same, taps)) + convolution.bias
        gated = (F.silu(y) * F.silu(gate)).view(2, 9, 2, 3)
        return F.rms_norm(gated, (3,), eps=1e-5).flatten(2) * norm.weight

    result, reference = norm(convolution(x, numbers), gate), plain(x, gate)
    torch.testing.assert_close(result, reference)
    leaves = [x, gate, *convolution.parameters(), *norm.parameters()]
    weights = torch.randn(reference.shape, generator=random, dtype=torch.float64)
    for value, expected in zip(*(torch.autograd.grad((y * weights).sum(), leaves) for y in (result, reference))):
        torch.testing.assert_close(value, expected)


def mixer(dtype=torch.float64):
    made = Mamba(8, SPEC, 1e-5, device=None, dtype=torch.float64)
    random = torch.Generator().manual_seed(2)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.5, generator=random)
    return made.to(dtype)


def where(rows, length, document_ids=None):
    return AttentionContext((rows, length), {}, lambda *_: torch.empty(0), document_ids)


def test_documents_in_a_row_are_apart():
    """A packed row is its documents alone, also where two that touch have gone by the same number before."""
    made, sizes, ids = mixer(), (3, 11, 1, 9), (5, 2, 5, 7)
    x = torch.randn(1, sum(sizes), 8, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    document_ids = torch.repeat_interleave(torch.tensor(ids), torch.tensor(sizes))[None]
    packed = made(x, where(1, sum(sizes), document_ids))
    alone = torch.cat([made(part, where(1, part.shape[1])) for part in x.split(sizes, dim=1)], dim=1)
    torch.testing.assert_close(packed, alone)
    assert not torch.allclose(made(x, where(1, sum(sizes))), alone)


def test_half_precision_rounds_once():
    """Inputs and results are in bfloat16, all between in float32."""
    x = torch.randn(2, 40, 8, generator=torch.Generator().manual_seed(4))
    expected = mixer(torch.float32)(x, where(2, 40))
    result = mixer(torch.bfloat16)(x.bfloat16(), where(2, 40))
    assert result.dtype == torch.bfloat16
    assert (result - expected).abs().max() < 0.03 * expected.abs().max()
