"""The recurrence of Mamba-2 (Dao and Gu, 2024, arXiv:2405.21060) chunk by chunk, as one operator and its gradient.

For every head, with a state h of (P, N) numbers that starts at zero in every document:

    h_t = exp(rate * step_t) h_{t-1} + step_t x_t b_t^T        y_t = h_t c_t + d x_t

A chunk of Q positions takes matrix products only, section 6 of the paper: what its positions give each other is a
causal attention of Q x Q scores, c_i . b_j times the decay between them; the rest comes from the state that enters the
chunk. Only inputs are kept for the backward pass, which works out the states at the chunks' beginnings once more. Sums
and products are in float32, or float64 for inputs in that.

Letters: B sequences, S positions, H heads of P channels, G groups of R = H / G heads, N numbers of a channel's state;
in einsums b, m (chunks), q and k (positions), g, r, p, n.
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

from kumi.nn.dtypes import wide
from kumi.nn.operators import define

# Scores of all heads that are held at a time, on other devices and on a CPU, whose caches should hold them.
SCORES = (2**27, 2**19)


class Inputs(NamedTuple):
    """`x` (B, S, H, P), `b` and `c` (B, S, G, N), `dt` (B, S, H) and the parameters `dt_bias`, `a_log` and `d` (H,).

    The step is softplus(dt + dt_bias), kept between `low` and `high`, the rate -exp(a_log). `numbers` (B, S) tell a
    row's documents apart, and go up by one from each to the next; None: a row is a document.
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


def scan(inputs: Inputs) -> Tensor:
    """y (B, S, H, P), in the dtype of x."""
    out: Tensor = _Scan.apply(*inputs)  # type: ignore[no-untyped-call]
    return out


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *values: Any) -> Tensor:
        inputs = Inputs(*values)
        ctx.save_for_backward(*values[:8])
        ctx.options = values[8:]
        out: Tensor = SCAN(*inputs)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        found: list[Tensor] = SCAN_BACKWARD(grad, *ctx.saved_tensors, *ctx.options)
        return *found, None, None, None, None


@dataclass(frozen=True)
class _Span:
    """Some chunks of a scan: `x` (b, m, g, q, r, p) times its steps, `b` and `c` (b, m, g, q, n), and the sums of rates
    times steps from the chunk's beginning to each position, `sums` (b, m, g, q, r), in float64 where the device has it.

    `inside` says which positions k give to which q. Decays are 0 across documents: `entering` (b, m, g, q, r, 1) from
    the chunk's beginning to q, `leaving` (b, m, g, q, r, 1) from q to its end, `through` (b, m, g, r, 1, 1) from its
    beginning to its end. Groups come before positions in memory, too, or every product would copy what it reads.
    """

    x: Tensor
    b: Tensor
    c: Tensor
    sums: Tensor
    inside: Tensor
    entering: Tensor
    leaving: Tensor
    through: Tensor

    @cached_property
    def decay(self) -> Tensor:
        """From position k to q (b, m, g, r, q, k): 0 where k comes after q, or belongs to another document."""
        # Contiguous, or what is made of it lies as oddly; in two parts, or differences of large sums are coarse.
        exact = self.sums.transpose(3, 4)
        near = exact.to(self.x.dtype).contiguous()
        rest = (exact - near).to(near.dtype).contiguous()
        found = near[..., :, None] - near[..., None, :]
        if exact.dtype != near.dtype:
            found.add_(rest[..., :, None]).sub_(rest[..., None, :])
        return found.masked_fill_(~self.inside, -torch.inf).exp_()

    @property
    def written(self) -> Tensor:
        """What each chunk adds to the state (b, m, g, r, p, n)."""
        return torch.einsum("bmgqrp,bmgqn->bmgrpn", self.x * self.leaving, self.b)

    @property
    def products(self) -> Tensor:
        """c_q . b_k (b, m, g, 1, q, k)."""
        return torch.einsum("bmgqn,bmgkn->bmgqk", self.c, self.b).unsqueeze(3)


def _scan(*values: Any) -> Tensor:
    inputs = Inputs(*values)
    _, steps, rate = _steps(inputs)
    out, state = torch.empty_like(inputs.x, memory_format=torch.contiguous_format), _no_state(inputs)
    for place in _places(inputs):
        span = _span(inputs, steps, rate, place)
        entering, state = _pass_on(span.written, span.through, state)
        scores = span.decay * span.products
        made = torch.einsum("bmgrqk,bmgkrp->bmgqrp", scores, span.x)
        made += torch.einsum("bmgqn,bmgrpn->bmgqrp", span.c, entering) * span.entering
        where = slice(place.start, place.start + place.chunks * place.size)
        skipped = inputs.d.to(made.dtype)[:, None] * inputs.x[:, where]
        out[:, where] = skipped.add_(_in_order(made, skipped))
    return out


def _scan_backward(grad: Tensor, *values: Any) -> list[Tensor]:
    """The gradients of the first seven inputs, given that of the result."""
    inputs = Inputs(*values)
    raw, steps, rate = _steps(inputs)
    places = list(_places(inputs))
    states = _states(inputs, steps, rate, places)
    of_x, of_b, of_c = (torch.empty_like(value, memory_format=torch.contiguous_format) for value in inputs[:3])
    of_steps, of_sums = torch.empty_like(steps), torch.empty_like(steps)
    of_state, of_d = _no_state(inputs), torch.zeros_like(rate)
    for place, entering in zip(reversed(places), reversed(states), strict=True):
        where = slice(place.start, place.start + place.chunks * place.size)
        span = _span(inputs, steps, rate, place)
        found = _span_backward(span, _chunks(grad, place, inputs).to(steps.dtype), entering, of_state)
        of_state = found.of_state
        for part, value in ((of_b[:, where], found.of_b), (of_c[:, where], found.of_c)):
            part.copy_(_in_order(value, part))
        of_sums[:, where] = _in_order(found.of_sums.flip(3).cumsum(3).flip(3), of_sums[:, where])
        of_stepped, x = _in_order(found.of_x, of_x[:, where]), inputs.x[:, where].to(steps.dtype)
        of_steps[:, where] = (of_stepped * x).sum(-1)
        of_d += (grad[:, where] * x).sum((0, 1, 3))
        skipped = inputs.d.to(x.dtype)[:, None] * grad[:, where]
        of_x[:, where] = of_stepped.mul_(steps[:, where, :, None]).add_(skipped)
    of_rate = (of_sums * steps).sum((0, 1))
    of_steps.addcmul_(of_sums, rate)
    inside = (F.softplus(raw) >= inputs.low) & (F.softplus(raw) <= inputs.high)
    of_dt = of_steps * torch.sigmoid(raw) * inside
    small = (of_dt, of_dt.sum((0, 1)), of_rate * rate, of_d)
    kinds = (inputs.dt.dtype, inputs.dt_bias.dtype, inputs.a_log.dtype, inputs.d.dtype)
    return [of_x, of_b, of_c, *(value.to(kind) for value, kind in zip(small, kinds, strict=True))]


class _Gradients(NamedTuple):
    """Of a span's x, b, c and sums of rates and steps; and of the state that enters it."""

    of_x: Tensor
    of_b: Tensor
    of_c: Tensor
    of_sums: Tensor
    of_state: Tensor


def _span_backward(span: _Span, grad: Tensor, entering: Tensor, of_state: Tensor) -> _Gradients:
    """Given the gradient (b, m, g, q, r, p) of what the span returned, the states that enter its chunks, and the
    gradient of the one that leaves it.

    An exponent's gradient is the value times the value's: that of position q's own sum is what its result gave, that of
    k's is minus what it gave others; what the leaving state gave belongs to the sum at the chunk's end.
    """
    decayed = grad * span.entering
    own = torch.einsum("bmgqn,bmgqrp->bmgrpn", span.c, decayed)
    leaving, of_state = _pass_back(own, span.through, of_state)
    of_scores = torch.einsum("bmgqrp,bmgkrp->bmgrqk", grad, span.x).mul_(span.decay)
    of_products, products = of_scores.sum(3), span.products
    rows = of_scores.mul_(products).sum(-1)
    scores = span.decay * products
    written = torch.einsum("bmgqn,bmgrpn->bmgqrp", span.b, leaving) * span.leaving
    read = torch.einsum("bmgqn,bmgrpn->bmgqrp", span.c, entering)
    of_c = torch.einsum("bmgqk,bmgkn->bmgqn", of_products, span.b)
    of_c += torch.einsum("bmgqrp,bmgrpn->bmgqn", decayed, entering)
    of_b = torch.einsum("bmgqk,bmgqn->bmgkn", of_products, span.c)
    of_b += torch.einsum("bmgqrp,bmgrpn->bmgqn", span.x * span.leaving, leaving)
    of_x = torch.einsum("bmgrqk,bmgqrp->bmgkrp", scores, grad) + written
    of_sums = rows.transpose(3, 4) + (decayed * read).sum(-1) - (span.x * of_x).sum(-1)
    through = (span.through * leaving * entering).sum((-1, -2))
    of_sums[:, :, :, -1] += (span.x * written).sum((-1, 3)) + through
    return _Gradients(of_x, of_b, of_c, of_sums, of_state)


class _Place(NamedTuple):
    """`chunks` of `size` positions each, from position `start` of every row on."""

    start: int
    chunks: int
    size: int


def _places(inputs: Inputs) -> Iterator[_Place]:
    """The chunks of a scan, as many at a time as `SCORES` allows; the last may be shorter."""
    rows, length, heads, _ = inputs.x.shape
    limit = SCORES[inputs.x.device.type == "cpu"]
    most = max(1, limit // (rows * heads * inputs.chunk**2))
    whole, left = divmod(length, inputs.chunk)
    for first in range(0, whole, most):
        yield _Place(first * inputs.chunk, min(most, whole - first), inputs.chunk)
    if left:
        yield _Place(whole * inputs.chunk, 1, left)


def _steps(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """dt + dt_bias, the steps (B, S, H) and the rates (H,)."""
    dtype = wide(inputs.x.dtype)
    raw = inputs.dt.to(dtype) + inputs.dt_bias.to(dtype)
    return raw, F.softplus(raw).clamp(inputs.low, inputs.high), -inputs.a_log.to(dtype).exp()


def _no_state(inputs: Inputs) -> Tensor:
    """The state (b, g, r, p, n) at a row's beginning."""
    rows, _, heads, channels = inputs.x.shape
    groups, size = inputs.b.shape[2:]
    return inputs.x.new_zeros(rows, groups, heads // groups, channels, size, dtype=wide(inputs.x.dtype))


def _chunks(value: Tensor, place: _Place, inputs: Inputs) -> Tensor:
    """The part of `value` (B, S, H, ...) at `place`, as (b, m, g, q, r, ...)."""
    part = value[:, place.start : place.start + place.chunks * place.size]
    groups = inputs.b.shape[2]
    return _by_group(part.reshape(*part.shape[:2], groups, part.shape[2] // groups, *part.shape[3:]), place)


def _by_group(part: Tensor, place: _Place) -> Tensor:
    """(b, m, g, q, ...) of (b, m * q, g, ...)."""
    parted = part.reshape(len(part), place.chunks, place.size, *part.shape[2:])
    return parted.transpose(2, 3).contiguous()


def _in_order(value: Tensor, like: Tensor) -> Tensor:
    """(b, m, g, q, ...) in the shape of `like`, (b, m * q, ...)."""
    return value.transpose(2, 3).reshape(like.shape)


def _span(inputs: Inputs, steps: Tensor, rate: Tensor, place: _Place) -> _Span:
    where = slice(place.start, place.start + place.chunks * place.size)
    b, c = (_by_group(value[:, where].to(steps.dtype), place) for value in inputs[1:3])
    step = _chunks(steps, place, inputs)
    exact = steps.dtype if steps.device.type == "mps" else torch.float64
    sums = (step.to(exact) * rate.view(step.shape[2], 1, step.shape[4])).cumsum(3)
    inside, begun, ended, unbroken = _same_document(inputs, place)
    last = sums[:, :, :, -1:]
    entering, leaving, through = (part.exp().to(steps.dtype) for part in (sums, last - sums, last[:, :, :, 0]))
    return _Span(
        _chunks(inputs.x, place, inputs) * step[..., None],
        b,
        c,
        sums,
        inside,
        (entering * begun)[..., None],
        (leaving * ended)[..., None],
        (through * unbroken)[..., None, None],
    )


def _same_document(inputs: Inputs, place: _Place) -> tuple[Tensor, Tensor | int, Tensor | int, Tensor | int]:
    """Where positions belong to one document: k before q, or q itself (b, m, 1, 1, q, k), the position before the chunk
    and q, q and the chunk's last position (b, m, 1, q, 1), and these two (b, m, 1, 1)."""
    size = place.size
    causal = torch.ones(size, size, dtype=torch.bool, device=inputs.x.device).tril_()
    if inputs.numbers is None:
        return causal, 1, 1, 1
    stop = place.start + place.chunks * size
    numbers = inputs.numbers[:, place.start : stop].reshape(-1, place.chunks, size)
    before = inputs.numbers[:, max(0, place.start - 1) : stop - 1 : size]
    if not place.start:
        before = torch.cat((numbers[:, :1, 0], inputs.numbers[:, size - 1 : stop - 1 : size]), dim=1)
    inside = causal & (numbers[..., :, None] == numbers[..., None, :])
    begun, ended = numbers == before[..., None], numbers == numbers[..., -1:]
    unbroken = before == numbers[..., -1]
    return inside[:, :, None, None], begun[:, :, None, :, None], ended[:, :, None, :, None], unbroken[..., None, None]


def _pass_on(written: Tensor, through: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The states (b, m, g, r, p, n) that enter a span's chunks, and the one that leaves it."""
    entering = []
    for added, kept in zip(written.unbind(1), through.unbind(1), strict=True):
        entering.append(state)
        state = torch.addcmul(added, kept, state)
    return torch.stack(entering, dim=1), state


def _pass_back(own: Tensor, through: Tensor, of_state: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients (b, m, g, r, p, n) of the states that leave a span's chunks, and of the one that enters it."""
    leaving = []
    for added, kept in zip(reversed(own.unbind(1)), reversed(through.unbind(1)), strict=True):
        leaving.append(of_state)
        of_state = torch.addcmul(added, kept, of_state)
    return torch.stack(leaving[::-1], dim=1), of_state


def _states(inputs: Inputs, steps: Tensor, rate: Tensor, places: list[_Place]) -> list[Tensor]:
    """The states that enter the chunks of each of `places`."""
    found, state = [], _no_state(inputs)
    for place in places:
        span = _span(inputs, steps, rate, place)
        entering, state = _pass_on(span.written, span.through, state)
        found.append(entering)
    return found


_INPUTS = (
    "Tensor x, Tensor b, Tensor c, Tensor dt, Tensor dt_bias, Tensor a_log, Tensor d, Tensor? numbers, "
    "int chunk, float low, float high"
)
SCAN = define(
    "mamba_scan",
    f"({_INPUTS}) -> Tensor",
    _scan,
    lambda x, *_: torch.empty_like(x, memory_format=torch.contiguous_format),
)
SCAN_BACKWARD = define(
    "mamba_scan_backward",
    f"(Tensor grad, {_INPUTS}) -> Tensor[]",
    _scan_backward,
    lambda grad, *inputs: [torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs[:7]],
)


def _products(x: tuple[int, ...], b: tuple[int, ...], chunk: int) -> tuple[int, int, int]:
    """Multiplications and additions of one product of scores and x, of one of b and c, and of one of states and x."""
    rows, length, heads, channels = x
    groups, size = b[2:]
    pairs = rows * (length // chunk * chunk**2 + (length % chunk) ** 2)
    return 2 * pairs * heads * channels, 2 * pairs * groups * size, 2 * rows * length * heads * channels * size


@register_flop_formula(torch.ops.kumi.mamba_scan)
def _scan_flops(x: tuple[int, ...], b: tuple[int, ...], *rest: Any, **_: Any) -> int:
    """As `kumi.spec.op.Op.forward_flops` counts them."""
    scores, pairs, states = _products(x, b, rest[6])
    return scores + pairs + 2 * states


@register_flop_formula(torch.ops.kumi.mamba_scan_backward)
def _scan_backward_flops(_: Any, x: tuple[int, ...], b: tuple[int, ...], *rest: Any, **__: Any) -> int:
    scores, pairs, states = _products(x, b, rest[6])
    return 2 * scores + 3 * pairs + 6 * states
