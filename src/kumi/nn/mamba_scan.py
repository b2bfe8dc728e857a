"""The recurrence of Mamba-2 (Dao and Gu, 2024, arXiv:2405.21060), computed in chunks, as one operator and its gradient.

Each head has a state h of (P, N) numbers, which starts at zero in each document:

    h_t = exp(rate * step_t) h_{t-1} + step_t x_t b_t^T        y_t = h_t c_t + d x_t

A chunk of Q positions is computed by matrix products (section 6 of the paper). Within a chunk, positions contribute to
each other by causal attention with Q x Q scores, c_i . b_j times the decay between i and j. Earlier chunks contribute
by the state at the start of the chunk. Only the inputs are kept for the backward pass, which recomputes the states at
the starts of chunks. Sums and products are in float32, or in float64 for float64 inputs.

Letters: B sequences, S positions, H heads of P channels, G groups of R = H / G heads, N numbers of state per channel.
In einsums: b, m (chunks), q and k (positions of a chunk), g, r, p, n.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from kumi.nn.custom_ops import define_op
from kumi.nn.dtypes import wide
from kumi.nn.numerics import kernel

# Scores in memory at a time, over all heads: (on devices other than a CPU, on a CPU, whose caches they should fit).
SCORES_AT_ONCE = (2**27, 2**19)


class ScanInputs(NamedTuple):
    """The inputs of a scan.

    `x` (B, S, H, P), `b` and `c` (B, S, G, N), `dt` (B, S, H): the projections.
    `dt_bias`, `a_log`, `d` (H,): the parameters. The step is softplus(dt + dt_bias), the rate is -exp(a_log).
    `numbers` (B, S): document numbers, which increase by one at each boundary in a row; None if every row is one
    document.
    `chunk`: positions per chunk.
    `low`, `high`: limits of the step.
    """

    x: Tensor
    b: Tensor
    c: Tensor
    dt: Tensor
    dt_bias: Tensor
    a_log: Tensor
    d: Tensor
    numbers: Tensor | None
    chunk: int
    low: float
    high: float


def scan(inputs: ScanInputs) -> Tensor:
    """Return y (B, S, H, P), in the dtype of x."""
    out: Tensor = _Scan.apply(*inputs)  # type: ignore[no-untyped-call]
    return out


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *values: Any) -> Tensor:
        inputs = ScanInputs(*values)
        ctx.save_for_backward(*values[:8])
        ctx.options = values[8:]
        out: Tensor = SCAN(*inputs)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grads: list[Tensor] = SCAN_BACKWARD(grad, *ctx.saved_tensors, *ctx.options)
        return *grads, None, None, None, None


@dataclass(frozen=True)
class _Chunks:
    """Some consecutive chunks of a scan. Groups precede positions in memory, so that matrix products need no copies.

    `x` (b, m, g, q, r, p): the channels times their steps.
    `b`, `c` (b, m, g, q, n): as in `ScanInputs`, in float32 or wider.
    `sums` (b, m, g, q, r): sum of rate times step from the chunk's start to each position, in float64 if the device has
    it.
    `visible` (b, m, 1, 1, q, k), or (q, k) for all: True where position k contributes to position q.
    `from_start` (b, m, g, q, r, 1): decay from the chunk's start to q, 0 across documents.
    `to_end` (b, m, g, q, r, 1): decay from q to the chunk's end, 0 across documents.
    `through` (b, m, g, r, 1, 1): decay from the chunk's start to its end, 0 across documents.
    """

    x: Tensor
    b: Tensor
    c: Tensor
    sums: Tensor
    visible: Tensor
    from_start: Tensor
    to_end: Tensor
    through: Tensor

    @cached_property
    def decay(self) -> Tensor:
        """The decay (b, m, g, r, q, k) from position k to q: 0 if k comes after q or is in another document."""
        # The operands are contiguous, so that the results are contiguous, too. High and low parts are subtracted
        # separately, because differences of large sums lose precision.
        sums = self.sums.transpose(3, 4)
        high = sums.to(self.x.dtype).contiguous()
        low = (sums - high).to(high.dtype).contiguous()
        exponents = high[..., :, None] - high[..., None, :]
        if sums.dtype != high.dtype:
            exponents.add_(low[..., :, None]).sub_(low[..., None, :])
        return exponents.masked_fill_(~self.visible, -torch.inf).exp_()

    @property
    def written(self) -> Tensor:
        """The contribution (b, m, g, r, p, n) of each chunk to the state at its end."""
        return torch.einsum("bmgqrp,bmgqn->bmgrpn", self.x * self.to_end, self.b)

    @property
    def products(self) -> Tensor:
        """The products c_q . b_k (b, m, g, 1, q, k)."""
        return torch.einsum("bmgqn,bmgkn->bmgqk", self.c, self.b).unsqueeze(3)


def _scan(*values: Any) -> Tensor:
    inputs = ScanInputs(*values)
    if (kernels := _kernels(inputs)) is not None:
        y: Tensor = kernels.scan(inputs)
        return y
    _, steps, rate = _steps(inputs)
    out, state = torch.empty_like(inputs.x, memory_format=torch.contiguous_format), _zero_state(inputs)
    for chunk_range in _chunk_ranges(inputs):
        chunks = _load_chunks(inputs, steps, rate, chunk_range)
        entering, state = _scan_states(chunks.written, chunks.through, state)
        scores = chunks.decay * chunks.products
        y = torch.einsum("bmgrqk,bmgkrp->bmgqrp", scores, chunks.x)
        y += torch.einsum("bmgqn,bmgrpn->bmgqrp", chunks.c, entering) * chunks.from_start
        positions = slice(chunk_range.start, chunk_range.start + chunk_range.chunks * chunk_range.size)
        skip = inputs.d.to(y.dtype)[:, None] * inputs.x[:, positions]
        out[:, positions] = skip.add_(_by_position(y, skip))
    return out


def _scan_backward(grad: Tensor, *values: Any) -> list[Tensor]:
    """Return the gradients of the first seven inputs, given the gradient of the result."""
    inputs = ScanInputs(*values)
    if (kernels := _kernels(inputs)) is not None:
        return list(kernels.scan_backward(grad, inputs))
    raw, steps, rate = _steps(inputs)
    chunk_ranges = list(_chunk_ranges(inputs))
    states = _entering_states(inputs, steps, rate, chunk_ranges)
    grad_x, grad_b, grad_c = (torch.empty_like(value, memory_format=torch.contiguous_format) for value in inputs[:3])
    grad_steps, grad_sums = torch.empty_like(steps), torch.empty_like(steps)
    grad_state, grad_d = _zero_state(inputs), torch.zeros_like(rate)
    for chunk_range, entering in zip(reversed(chunk_ranges), reversed(states), strict=True):
        positions = slice(chunk_range.start, chunk_range.start + chunk_range.chunks * chunk_range.size)
        chunks = _load_chunks(inputs, steps, rate, chunk_range)
        grads = _chunks_backward(chunks, _in_chunks(grad, chunk_range, inputs).to(steps.dtype), entering, grad_state)
        grad_state = grads.grad_state
        for target, value in ((grad_b[:, positions], grads.grad_b), (grad_c[:, positions], grads.grad_c)):
            target.copy_(_by_position(value, target))
        grad_sums[:, positions] = _by_position(grads.grad_sums.flip(3).cumsum(3).flip(3), grad_sums[:, positions])
        grad_stepped_x, x = _by_position(grads.grad_x, grad_x[:, positions]), inputs.x[:, positions].to(steps.dtype)
        grad_steps[:, positions] = (grad_stepped_x * x).sum(-1)
        grad_d += (grad[:, positions] * x).sum((0, 1, 3))
        skip = inputs.d.to(x.dtype)[:, None] * grad[:, positions]
        grad_x[:, positions] = grad_stepped_x.mul_(steps[:, positions, :, None]).add_(skip)
    grad_rate = (grad_sums * steps).sum((0, 1))
    grad_steps.addcmul_(grad_sums, rate)
    unclamped = (F.softplus(raw) >= inputs.low) & (F.softplus(raw) <= inputs.high)
    grad_dt = grad_steps * torch.sigmoid(raw) * unclamped
    small_grads = (grad_dt, grad_dt.sum((0, 1)), grad_rate * rate, grad_d)
    dtypes = (inputs.dt.dtype, inputs.dt_bias.dtype, inputs.a_log.dtype, inputs.d.dtype)
    return [grad_x, grad_b, grad_c, *(value.to(dtype) for value, dtype in zip(small_grads, dtypes, strict=True))]


def _kernels(inputs: ScanInputs) -> Any:
    """Return the module of kernels that is chosen for scans and can compute `inputs`, or None."""
    kernels = kernel("scan")
    return kernels if kernels is not None and kernels.takes(inputs) else None


class _Gradients(NamedTuple):
    """The gradients of x, b, c and sums of a `_Chunks`, and of the state at the start of its first chunk."""

    grad_x: Tensor
    grad_b: Tensor
    grad_c: Tensor
    grad_sums: Tensor
    grad_state: Tensor


def _chunks_backward(chunks: _Chunks, grad: Tensor, entering: Tensor, grad_state: Tensor) -> _Gradients:
    """Return the gradients of `chunks`.

    `grad` (b, m, g, q, r, p): gradient of the result.
    `entering`: the states at the starts of the chunks.
    `grad_state`: gradient of the state at the end of the last chunk.

    The gradient of an exponent is the exponential times its gradient. The sum at position q therefore gets the
    contribution of q's result, and the sum at k gets minus the contributions of k to other results. The contribution
    to the final state goes to the sum at the chunk's end.
    """
    decayed = grad * chunks.from_start
    grad_written = torch.einsum("bmgqn,bmgqrp->bmgrpn", chunks.c, decayed)
    grad_leaving, grad_state = _scan_state_grads(grad_written, chunks.through, grad_state)
    grad_scores = torch.einsum("bmgqrp,bmgkrp->bmgrqk", grad, chunks.x).mul_(chunks.decay)
    grad_products, products = grad_scores.sum(3), chunks.products
    row_sums = grad_scores.mul_(products).sum(-1)
    scores = chunks.decay * products
    written = torch.einsum("bmgqn,bmgrpn->bmgqrp", chunks.b, grad_leaving) * chunks.to_end
    read = torch.einsum("bmgqn,bmgrpn->bmgqrp", chunks.c, entering)
    grad_c = torch.einsum("bmgqk,bmgkn->bmgqn", grad_products, chunks.b)
    grad_c += torch.einsum("bmgqrp,bmgrpn->bmgqn", decayed, entering)
    grad_b = torch.einsum("bmgqk,bmgqn->bmgkn", grad_products, chunks.c)
    grad_b += torch.einsum("bmgqrp,bmgrpn->bmgqn", chunks.x * chunks.to_end, grad_leaving)
    grad_x = torch.einsum("bmgrqk,bmgqrp->bmgkrp", scores, grad) + written
    grad_sums = row_sums.transpose(3, 4) + (decayed * read).sum(-1) - (chunks.x * grad_x).sum(-1)
    through = (chunks.through * grad_leaving * entering).sum((-1, -2))
    grad_sums[:, :, :, -1] += (chunks.x * written).sum((-1, 3)) + through
    return _Gradients(grad_x, grad_b, grad_c, grad_sums, grad_state)


class _ChunkRange(NamedTuple):
    """`chunks` chunks of `size` positions each, from position `start` of every row."""

    start: int
    chunks: int
    size: int


def _chunk_ranges(inputs: ScanInputs) -> Iterator[_ChunkRange]:
    """Yield the chunks of a scan, as many at a time as `SCORES_AT_ONCE` allows. The last chunk may be shorter."""
    rows, length, heads, _ = inputs.x.shape
    limit = SCORES_AT_ONCE[inputs.x.device.type == "cpu"]
    limit_chunks = max(1, limit // (rows * heads * inputs.chunk**2))
    full_chunks, remainder = divmod(length, inputs.chunk)
    for first in range(0, full_chunks, limit_chunks):
        yield _ChunkRange(first * inputs.chunk, min(limit_chunks, full_chunks - first), inputs.chunk)
    if remainder:
        yield _ChunkRange(full_chunks * inputs.chunk, 1, remainder)


def _steps(inputs: ScanInputs) -> tuple[Tensor, Tensor, Tensor]:
    """Return dt + dt_bias and the steps (B, S, H), and the rates (H,)."""
    dtype = wide(inputs.x.dtype)
    raw = inputs.dt.to(dtype) + inputs.dt_bias.to(dtype)
    return raw, F.softplus(raw).clamp(inputs.low, inputs.high), -inputs.a_log.to(dtype).exp()


def _zero_state(inputs: ScanInputs) -> Tensor:
    """Return the state (b, g, r, p, n) at the start of a row: zeros."""
    rows, _, heads, channels = inputs.x.shape
    groups, size = inputs.b.shape[2:]
    return inputs.x.new_zeros(rows, groups, heads // groups, channels, size, dtype=wide(inputs.x.dtype))


def _in_chunks(value: Tensor, chunk_range: _ChunkRange, inputs: ScanInputs) -> Tensor:
    """Return the part of `value` (B, S, H, ...) in `chunk_range`, as (b, m, g, q, r, ...)."""
    part = value[:, chunk_range.start : chunk_range.start + chunk_range.chunks * chunk_range.size]
    groups = inputs.b.shape[2]
    return _by_group(part.reshape(*part.shape[:2], groups, part.shape[2] // groups, *part.shape[3:]), chunk_range)


def _by_group(part: Tensor, chunk_range: _ChunkRange) -> Tensor:
    """Return `part` (b, m * q, g, ...) as (b, m, g, q, ...)."""
    chunked = part.reshape(len(part), chunk_range.chunks, chunk_range.size, *part.shape[2:])
    return chunked.transpose(2, 3).contiguous()


def _by_position(value: Tensor, like: Tensor) -> Tensor:
    """Return `value` (b, m, g, q, ...) in the shape of `like`, (b, m * q, ...)."""
    return value.transpose(2, 3).reshape(like.shape)


def _load_chunks(inputs: ScanInputs, steps: Tensor, rate: Tensor, chunk_range: _ChunkRange) -> _Chunks:
    positions = slice(chunk_range.start, chunk_range.start + chunk_range.chunks * chunk_range.size)
    b, c = (_by_group(value[:, positions].to(steps.dtype), chunk_range) for value in inputs[1:3])
    step = _in_chunks(steps, chunk_range, inputs)
    sum_dtype = steps.dtype if steps.device.type == "mps" else torch.float64
    sums = (step.to(sum_dtype) * rate.view(step.shape[2], 1, step.shape[4])).cumsum(3)
    visible, same_as_start, same_as_end, same_throughout = _same_document(inputs, chunk_range)
    last = sums[:, :, :, -1:]
    from_start, to_end, through = (part.exp().to(steps.dtype) for part in (sums, last - sums, last[:, :, :, 0]))
    return _Chunks(
        _in_chunks(inputs.x, chunk_range, inputs) * step[..., None],
        b,
        c,
        sums,
        visible,
        (from_start * same_as_start)[..., None],
        (to_end * same_as_end)[..., None],
        (through * same_throughout)[..., None, None],
    )


def _same_document(
    inputs: ScanInputs, chunk_range: _ChunkRange
) -> tuple[Tensor, Tensor | int, Tensor | int, Tensor | int]:
    """Return masks of positions in the same document; the last three are 1 if every row is one document.

    - k and q, with k not after q: (b, m, 1, 1, q, k), or (q, k) if every row is one document;
    - the position before the chunk and q: (b, m, 1, q, 1);
    - q and the chunk's last position: (b, m, 1, q, 1);
    - the position before the chunk and the chunk's last position: (b, m, 1, 1).
    """
    size = chunk_range.size
    causal = torch.ones(size, size, dtype=torch.bool, device=inputs.x.device).tril_()
    if inputs.numbers is None:
        return causal, 1, 1, 1
    stop = chunk_range.start + chunk_range.chunks * size
    numbers = inputs.numbers[:, chunk_range.start : stop].reshape(-1, chunk_range.chunks, size)
    before = inputs.numbers[:, max(0, chunk_range.start - 1) : stop - 1 : size]
    if not chunk_range.start:
        before = torch.cat((numbers[:, :1, 0], inputs.numbers[:, size - 1 : stop - 1 : size]), dim=1)
    visible = causal & (numbers[..., :, None] == numbers[..., None, :])
    same_as_start, same_as_end = numbers == before[..., None], numbers == numbers[..., -1:]
    same_throughout = before == numbers[..., -1]
    return (
        visible[:, :, None, None],
        same_as_start[:, :, None, :, None],
        same_as_end[:, :, None, :, None],
        same_throughout[..., None, None],
    )


def _scan_states(written: Tensor, through: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return the states (b, m, g, r, p, n) at the starts of the chunks, and the state at the end of the last chunk.

    `written`, `through`: as in `_Chunks`. `state` (b, g, r, p, n): at the start of the first chunk.
    """
    entering = []
    for added, decay in zip(written.unbind(1), through.unbind(1), strict=True):
        entering.append(state)
        state = torch.addcmul(added, decay, state)
    return torch.stack(entering, dim=1), state


@torch.no_grad()
def final_state(inputs: ScanInputs, start: int, stop: int) -> Tensor:
    """Return the state (H, P, N) after the document at positions start to stop of a batch of one row.

    Each position contributes its step times x b^T, decayed from there to the end of the document.
    """
    _, steps, rate = _steps(inputs)
    part = steps[0, start:stop]
    sum_dtype = part.dtype if part.device.type == "mps" else torch.float64
    sums = (part.to(sum_dtype) * rate).cumsum(0)
    decay = (sums[-1] - sums).exp().to(part.dtype)
    x = inputs.x[0, start:stop].to(part.dtype) * (part * decay)[..., None]
    b = inputs.b[0, start:stop].to(part.dtype)
    return torch.einsum("sgrp,sgn->grpn", x.view(len(x), b.shape[1], -1, x.shape[-1]), b).flatten(0, 1)


@torch.no_grad()
def continue_scan(inputs: ScanInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return y (1, S, H, P) of positions that continue a document from `state` (H, P, N), and the state after them.

    The recurrence is linear: `state`, decayed to a position and multiplied by its c, is added to the
    result there.
    """
    _, steps, rate = _steps(inputs)
    sum_dtype = steps.dtype if steps.device.type == "mps" else torch.float64
    decay = (steps[0].to(sum_dtype) * rate).cumsum(0).exp().to(steps.dtype)
    c, groups = inputs.c[0].to(steps.dtype), inputs.b.shape[2]
    read = torch.einsum("sgn,grpn->sgrp", c, state.view(groups, -1, *state.shape[1:])).flatten(1, 2)
    y = scan(inputs).to(steps.dtype) + read * decay[..., None]
    return y.to(inputs.x.dtype), final_state(inputs, 0, len(c)) + decay[-1, :, None, None] * state


@torch.no_grad()
def scan_step(inputs: ScanInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return y (B, 1, H, P) of the next position of each row after `state` (B, H, P, N), and the state after it."""
    _, steps, rate = _steps(inputs)
    x, b, c = (value[:, 0].to(steps.dtype) for value in inputs[:3])
    rows, heads, channels = x.shape
    groups, size = b.shape[1:]
    per_group = (rows, groups, heads // groups)
    step, x, state = steps.view(per_group), x.reshape(*per_group, channels), state.view(*per_group, channels, size)
    decay = (step * rate.view(per_group[1:])).exp()
    state = state * decay[..., None, None] + torch.einsum("bgrp,bgn->bgrpn", x * step[..., None], b)
    y = torch.einsum("bgrpn,bgn->bgrp", state, c) + x * inputs.d.to(x.dtype).view(*per_group[1:], 1)
    return y.flatten(1, 2)[:, None].to(inputs.x.dtype), state.flatten(1, 2)


def _scan_state_grads(added_grads: Tensor, through: Tensor, grad_state: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients (b, m, g, r, p, n) of the states at the ends of the chunks, and of the state at the
    start of the first chunk."""
    leaving = []
    for added, decay in zip(reversed(added_grads.unbind(1)), reversed(through.unbind(1)), strict=True):
        leaving.append(grad_state)
        grad_state = torch.addcmul(added, decay, grad_state)
    return torch.stack(leaving[::-1], dim=1), grad_state


def _entering_states(inputs: ScanInputs, steps: Tensor, rate: Tensor, chunk_ranges: list[_ChunkRange]) -> list[Tensor]:
    """Return the states at the starts of the chunks, for each of `chunk_ranges`."""
    result, state = [], _zero_state(inputs)
    for chunk_range in chunk_ranges:
        chunks = _load_chunks(inputs, steps, rate, chunk_range)
        entering, state = _scan_states(chunks.written, chunks.through, state)
        result.append(entering)
    return result


_INPUTS = (
    "Tensor x, Tensor b, Tensor c, Tensor dt, Tensor dt_bias, Tensor a_log, Tensor d, Tensor? numbers, "
    "int chunk, float low, float high"
)
SCAN = define_op(
    "mamba_scan",
    f"({_INPUTS}) -> Tensor",
    _scan,
    lambda x, *_: torch.empty_like(x, memory_format=torch.contiguous_format),
)
SCAN_BACKWARD = define_op(
    "mamba_scan_backward",
    f"(Tensor grad, {_INPUTS}) -> Tensor[]",
    _scan_backward,
    lambda grad, *inputs: [torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs[:7]],
)


# Index of `chunk` among the arguments after x and b.
_CHUNK = ScanInputs._fields.index("chunk") - 2


def _product_flops(x: tuple[int, ...], b: tuple[int, ...], chunk: int) -> tuple[int, int, int]:
    """Return the FLOPs of one product of scores and x, of one of b and c, and of one of states and x."""
    rows, length, heads, channels = x
    groups, size = b[2:]
    pairs = rows * (length // chunk * chunk**2 + (length % chunk) ** 2)
    return 2 * pairs * heads * channels, 2 * pairs * groups * size, 2 * rows * length * heads * channels * size


@register_flop_formula(torch.ops.kumi.mamba_scan)
def _scan_flops(x: tuple[int, ...], b: tuple[int, ...], *rest: Any, **_: Any) -> int:
    """Return the FLOPs of the forward pass, as `kumi.spec.op.Op.forward_flops` counts them."""
    scores, pairs, states = _product_flops(x, b, rest[_CHUNK])
    return scores + pairs + 2 * states


@register_flop_formula(torch.ops.kumi.mamba_scan_backward)
def _scan_backward_flops(_: Any, x: tuple[int, ...], b: tuple[int, ...], *rest: Any, **__: Any) -> int:
    scores, pairs, states = _product_flops(x, b, rest[_CHUNK])
    return 2 * scores + 3 * pairs + 6 * states
