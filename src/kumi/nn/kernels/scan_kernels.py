"""Triton kernels for the recurrence of Mamba-2 in chunks (Dao and Gu, 2024, arXiv:2405.21060, section 6).

They compute what `kumi.nn.mamba_scan` computes, and use its letters and names, with M chunks of Q positions in a row.
"Sums" are those of rate times step from the start of a chunk (see `_Decays`). The scores of a chunk are in registers
only, tile by tile, as in FlashAttention.

    forward     sum_outer        what each chunk adds to the state               (B, M, H, P, N)
                pass_states      from what is added, the state before each chunk, in place
                scan_chunks      y, from the scores within a chunk and the state before it
    backward    sum_outer, pass_states     the states again, and in reverse order their gradients
                query_gradients  of c and of the sums, for each position as a query
                key_gradients    of b, x, the steps, d and the sums, for each position as a key

The decays are computed by PyTorch: they have one number for each position and head, while x has P. A tile's products
are in float32 for inputs of float32, else in TF32, whose 10 bits are more than bfloat16's 7.

Bytes moved, forward: x twice, y, b and c for each head, and four times the states, of 4 P N / Q bytes for each position
and head. The plain path also reads or writes Q numbers of 4 bytes for each position and head twelve times: its scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from kumi.nn.mamba_scan import ScanInputs

# Positions of a tile in the forward and in the gradient kernels. The latter have more accumulators, and would spill
# registers with 64.
_POSITIONS, _GRADIENT_POSITIONS = 64, 32
# Numbers of a state that a program of `pass_states` has.
_STATE_NUMBERS = 1024


@triton.jit
def _tile(pointer, position, length, item, items, WIDTH: tl.constexpr, LANES: tl.constexpr, CHUNK: tl.constexpr, first):
    """Return a tile (positions, LANES) of a tensor (length, items, WIDTH) in float32: 0 beyond chunk, row and WIDTH.

    `position`: positions in the chunk that begins at position `first`. `item`: the head or group.
    """
    lanes = tl.arange(0, LANES)
    inside = ((position < CHUNK) & (first + position < length))[:, None] & (lanes < WIDTH)[None, :]
    offsets = ((first + position).to(tl.int64) * items + item)[:, None] * WIDTH + lanes[None, :]
    return tl.load(pointer + offsets, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _state(states, chunk_head, P: tl.constexpr, N: tl.constexpr, P_LANES: tl.constexpr, N_LANES: tl.constexpr):
    """Return the state (P_LANES, N_LANES) of a chunk and head: 0 beyond P and N."""
    p, n = tl.arange(0, P_LANES), tl.arange(0, N_LANES)
    inside = (p < P)[:, None] & (n < N)[None, :]
    return tl.load(states + chunk_head * P * N + p[:, None] * N + n[None, :], mask=inside, other=0.0)


@triton.jit
def _column(pointer, position, chunk, head, heads, CHUNK: tl.constexpr):
    """Return the number of each position for `head`, from a tensor (chunks, CHUNK, heads): 0 beyond the chunk."""
    inside = position < CHUNK
    return tl.load(pointer + (chunk * CHUNK + position) * heads + head, mask=inside, other=0.0)


@triton.jit
def _decays(sums_high, sums_low, documents, query, key, chunk, head, heads, CHUNK: tl.constexpr):
    """Return the decay (queries, keys) from each key to each query, 0 if the key is later or in another document.

    High and low parts of the sums are subtracted separately, because differences of large sums lose precision.
    """
    high = _column(sums_high, query, chunk, head, heads, CHUNK)[:, None]
    high -= _column(sums_high, key, chunk, head, heads, CHUNK)[None, :]
    low = _column(sums_low, query, chunk, head, heads, CHUNK)[:, None]
    low -= _column(sums_low, key, chunk, head, heads, CHUNK)[None, :]
    query_document = tl.load(documents + chunk * CHUNK + query, mask=query < CHUNK, other=-1)
    key_document = tl.load(documents + chunk * CHUNK + key, mask=key < CHUNK, other=-2)
    visible = (query[:, None] >= key[None, :]) & (query_document[:, None] == key_document[None, :])
    return tl.exp(tl.where(visible, high + low, float("-inf")))


@triton.jit
def sum_outer(
    values,
    factors,
    keys,
    out,
    length,
    heads,
    groups,
    P: tl.constexpr,
    N: tl.constexpr,
    P_LANES: tl.constexpr,
    N_LANES: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write to `out` (B, M, heads, P, N) the sum over each chunk of factor * value key^T.

    A program computes one chunk and head.

    `values` (B, length, heads, P), `factors` (B, M, CHUNK, heads), `keys` (B, length, groups, N).
    """
    index, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    chunk, group = row * tl.num_programs(0) + index, head // (heads // groups)
    values += row * length * heads * P
    keys += row * length * groups * N
    total = tl.zeros((P_LANES, N_LANES), tl.float32)
    for start in range(0, CHUNK, BLOCK):
        position = start + tl.arange(0, BLOCK)
        value = _tile(values, position, length, head, heads, P, P_LANES, CHUNK, index * CHUNK)
        value *= _column(factors, position, chunk, head, heads, CHUNK)[:, None]
        key = _tile(keys, position, length, group, groups, N, N_LANES, CHUNK, index * CHUNK)
        total += tl.dot(tl.trans(value), key, input_precision=PRECISION)
    p, n = tl.arange(0, P_LANES), tl.arange(0, N_LANES)
    targets = out + (chunk * heads + head) * P * N + p[:, None] * N + n[None, :]
    tl.store(targets, total, mask=(p < P)[:, None] & (n < N)[None, :])


@triton.jit
def pass_states(states, through, chunks, heads, size, REVERSE: tl.constexpr, BLOCK: tl.constexpr):
    """Replace what each chunk adds, in `states` (B, chunks, heads, size), by the state before the chunk.

    If REVERSE, the chunks come in reverse order: what each adds to the state's gradient is replaced by the gradient of
    the state after the chunk.

    `through` (B, chunks, heads): the decay over each chunk. A program computes BLOCK numbers of a head's states.
    """
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    lanes = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    state = tl.zeros((BLOCK,), tl.float32)
    for step in range(0, chunks):
        index = chunks - 1 - step if REVERSE else step
        place = (row * chunks + index) * heads + head
        added = tl.load(states + place * size + lanes, mask=lanes < size, other=0.0)
        tl.store(states + place * size + lanes, state, mask=lanes < size)
        state = added + tl.load(through + place) * state


@triton.jit
def scan_chunks(
    x,
    b,
    c,
    d,
    steps,
    sums_high,
    sums_low,
    from_start,
    documents,
    states,
    out,
    length,
    heads,
    groups,
    chunks,
    P: tl.constexpr,
    N: tl.constexpr,
    P_LANES: tl.constexpr,
    N_LANES: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write y to `out` (B, length, heads, P). A program computes BLOCK positions of a chunk and head."""
    head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    tiles = tl.cdiv(CHUNK, BLOCK)
    index, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    chunk, group, first = row * chunks + index, head // (heads // groups), index * CHUNK
    x += row * length * heads * P
    b += row * length * groups * N
    c += row * length * groups * N
    query = tile * BLOCK + tl.arange(0, BLOCK)
    queries = _tile(c, query, length, group, groups, N, N_LANES, CHUNK, first)
    entering = _state(states, chunk * heads + head, P, N, P_LANES, N_LANES)
    y = tl.dot(queries, tl.trans(entering), input_precision=PRECISION)
    y *= _column(from_start, query, chunk, head, heads, CHUNK)[:, None]
    for start in range(0, (tile + 1) * BLOCK, BLOCK):
        key = start + tl.arange(0, BLOCK)
        keys = _tile(b, key, length, group, groups, N, N_LANES, CHUNK, first)
        scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
        scores *= _decays(sums_high, sums_low, documents, query, key, chunk, head, heads, CHUNK)
        values = _tile(x, key, length, head, heads, P, P_LANES, CHUNK, first)
        values *= _column(steps, key, chunk, head, heads, CHUNK)[:, None]
        y += tl.dot(scores, values, input_precision=PRECISION)
    y += tl.load(d + head).to(tl.float32) * _tile(x, query, length, head, heads, P, P_LANES, CHUNK, first)
    lanes = tl.arange(0, P_LANES)
    targets = out + ((row * length + first + query) * heads + head)[:, None] * P + lanes[None, :]
    inside = ((query < CHUNK) & (first + query < length))[:, None] & (lanes < P)[None, :]
    tl.store(targets, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def query_gradients(
    grad,
    x,
    b,
    c,
    steps,
    sums_high,
    sums_low,
    from_start,
    documents,
    states,
    grad_c,
    grad_sums,
    length,
    heads,
    groups,
    chunks,
    P: tl.constexpr,
    N: tl.constexpr,
    P_LANES: tl.constexpr,
    N_LANES: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write the gradient of c to `grad_c` (B, length, groups, N), and a part of the gradient of the sums.

    `grad` (B, length, heads, P): the gradient of y. `grad_sums` (B, M, CHUNK, heads): what each position's
    result contributes, from its products with earlier positions and with the state before the chunk.
    A program computes BLOCK positions of a chunk for all heads of a group.
    """
    group, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    tiles = tl.cdiv(CHUNK, BLOCK)
    index, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    chunk, first = row * chunks + index, index * CHUNK
    grad += row * length * heads * P
    x += row * length * heads * P
    b += row * length * groups * N
    c += row * length * groups * N
    query = tile * BLOCK + tl.arange(0, BLOCK)
    queries = _tile(c, query, length, group, groups, N, N_LANES, CHUNK, first)
    total = tl.zeros((BLOCK, N_LANES), tl.float32)
    for head in range(group * (heads // groups), (group + 1) * (heads // groups)):
        gradient = _tile(grad, query, length, head, heads, P, P_LANES, CHUNK, first)
        entering = _state(states, chunk * heads + head, P, N, P_LANES, N_LANES)
        decayed = gradient * _column(from_start, query, chunk, head, heads, CHUNK)[:, None]
        total += tl.dot(decayed, entering, input_precision=PRECISION)
        read = tl.dot(queries, tl.trans(entering), input_precision=PRECISION)
        sums = tl.sum(decayed * read, 1)
        for start in range(0, (tile + 1) * BLOCK, BLOCK):
            key = start + tl.arange(0, BLOCK)
            values = _tile(x, key, length, head, heads, P, P_LANES, CHUNK, first)
            values *= _column(steps, key, chunk, head, heads, CHUNK)[:, None]
            grad_scores = tl.dot(gradient, tl.trans(values), input_precision=PRECISION)
            grad_scores *= _decays(sums_high, sums_low, documents, query, key, chunk, head, heads, CHUNK)
            keys = _tile(b, key, length, group, groups, N, N_LANES, CHUNK, first)
            products = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
            sums += tl.sum(grad_scores * products, 1)
            total += tl.dot(grad_scores, keys, input_precision=PRECISION)
        tl.store(grad_sums + (chunk * CHUNK + query) * heads + head, sums, mask=query < CHUNK)
    lanes = tl.arange(0, N_LANES)
    targets = grad_c + ((row * length + first + query) * groups + group)[:, None] * N + lanes[None, :]
    inside = ((query < CHUNK) & (first + query < length))[:, None] & (lanes < N)[None, :]
    tl.store(targets, total.to(grad_c.dtype.element_ty), mask=inside)


@triton.jit
def key_gradients(
    grad,
    x,
    b,
    c,
    d,
    steps,
    sums_high,
    sums_low,
    to_end,
    documents,
    grad_states,
    grad_x,
    grad_b,
    dots,
    length,
    heads,
    groups,
    chunks,
    spacing,
    P: tl.constexpr,
    N: tl.constexpr,
    P_LANES: tl.constexpr,
    N_LANES: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write the gradients of x (B, length, heads, P) and b (B, length, groups, N), and four dot products.

    `grad_states` (B, M, heads, P, N): the gradient of the state after each chunk.
    `dots` (4, B, M, CHUNK, heads), the four blocks `spacing` numbers apart: (gradient of step * x) . x, (what the
    position adds to the state) . (the state's gradient), (gradient of y) . x, and (what the position contributes to
    the results of its chunk) . (their gradients). The last adds up the very products that `query_gradients` adds up
    for each result: the one is subtracted from the other, and products with other rounding would leave TF32's error.
    A program computes BLOCK positions of a chunk for all heads of a group.
    """
    group, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    tiles = tl.cdiv(CHUNK, BLOCK)
    index, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    chunk, first = row * chunks + index, index * CHUNK
    grad += row * length * heads * P
    x += row * length * heads * P
    grad_x += row * length * heads * P
    b += row * length * groups * N
    c += row * length * groups * N
    key = tile * BLOCK + tl.arange(0, BLOCK)
    inside = (key < CHUNK) & (first + key < length)
    keys = _tile(b, key, length, group, groups, N, N_LANES, CHUNK, first)
    p_lanes = tl.arange(0, P_LANES)
    total = tl.zeros((BLOCK, N_LANES), tl.float32)
    for head in range(group * (heads // groups), (group + 1) * (heads // groups)):
        values = _tile(x, key, length, head, heads, P, P_LANES, CHUNK, first)
        gradient = _tile(grad, key, length, head, heads, P, P_LANES, CHUNK, first)
        step = _column(steps, key, chunk, head, heads, CHUNK)[:, None]
        end = _column(to_end, key, chunk, head, heads, CHUNK)[:, None]
        leaving = _state(grad_states, chunk * heads + head, P, N, P_LANES, N_LANES)
        written = tl.dot(keys, tl.trans(leaving), input_precision=PRECISION) * end
        total += tl.dot(values * step * end, leaving, input_precision=PRECISION)
        stepped, passed = written, tl.zeros((BLOCK,), tl.float32)
        for start in range(tile * BLOCK, CHUNK, BLOCK):
            query = start + tl.arange(0, BLOCK)
            queries = _tile(c, query, length, group, groups, N, N_LANES, CHUNK, first)
            gradients = _tile(grad, query, length, head, heads, P, P_LANES, CHUNK, first)
            decays = tl.trans(_decays(sums_high, sums_low, documents, query, key, chunk, head, heads, CHUNK))
            products = tl.dot(keys, tl.trans(queries), input_precision=PRECISION)
            stepped += tl.dot(products * decays, gradients, input_precision=PRECISION)
            grad_scores = tl.dot(values * step, tl.trans(gradients), input_precision=PRECISION) * decays
            passed += tl.sum(grad_scores * products, 1)
            total += tl.dot(grad_scores, queries, input_precision=PRECISION)
        place = dots + (chunk * CHUNK + key) * heads + head
        tl.store(place, tl.sum(stepped * values, 1), mask=key < CHUNK)
        tl.store(place + spacing, tl.sum(written * values * step, 1), mask=key < CHUNK)
        tl.store(place + 2 * spacing, tl.sum(gradient * values, 1), mask=key < CHUNK)
        tl.store(place + 3 * spacing, passed, mask=key < CHUNK)
        result = stepped * step + tl.load(d + head).to(tl.float32) * gradient
        targets = grad_x + ((first + key).to(tl.int64) * heads + head)[:, None] * P + p_lanes[None, :]
        tl.store(targets, result.to(grad_x.dtype.element_ty), mask=inside[:, None] & (p_lanes < P)[None, :])
    lanes = tl.arange(0, N_LANES)
    targets = grad_b + ((row * length + first + key) * groups + group)[:, None] * N + lanes[None, :]
    tl.store(targets, total.to(grad_b.dtype.element_ty), mask=inside[:, None] & (lanes < N)[None, :])


class _Decays(NamedTuple):
    """Numbers of each position and head (B, M, Q, H), in float32.

    `raw`: dt + dt_bias (B, S, H), `rate` (H,).
    `steps`: 0 for positions beyond the row.
    `sums`: the sums of rate times step from the chunk's start, as a high and a low part, which add up to the sums in
    float64.
    `from_start`, `to_end`, `through` (B, M, H), and `documents` (B, M, Q), int32: as in `mamba_scan._Chunks`.
    """

    raw: Tensor
    rate: Tensor
    steps: Tensor
    sums: tuple[Tensor, Tensor]
    from_start: Tensor
    to_end: Tensor
    through: Tensor
    documents: Tensor


def _prepare(inputs: ScanInputs) -> _Decays:
    """Return steps, sums and decays of `inputs`."""
    rows, length, heads = inputs.dt.shape
    raw = inputs.dt.float() + inputs.dt_bias.float()
    rate = -inputs.a_log.float().exp()
    chunks = triton.cdiv(length, inputs.chunk)
    beyond = chunks * inputs.chunk - length
    steps = F.pad(F.softplus(raw).clamp(inputs.low, inputs.high), (0, 0, 0, beyond))
    steps = steps.view(rows, chunks, inputs.chunk, heads)
    exact = (steps.double() * rate).cumsum(2)
    high = exact.float()
    last = exact[:, :, -1:]
    from_start, to_end, through = (value.exp().float() for value in (exact, last - exact, last[:, :, 0]))
    documents = raw.new_zeros(rows, chunks, inputs.chunk, dtype=torch.int32)
    if inputs.numbers is not None:
        numbers = F.pad(inputs.numbers.int(), (0, beyond))
        numbers[:, length:] = numbers[:, length - 1 : length]
        documents = numbers.view(rows, chunks, inputs.chunk)
        # The document of the position before each chunk. Before the first chunk, the state is 0.
        before = torch.cat((documents[:, :1, 0], documents[:, :-1, -1]), dim=1)
        from_start = from_start * (documents == before[..., None])[..., None]
        to_end = to_end * (documents == documents[..., -1:])[..., None]
        through = through * (before == documents[..., -1])[..., None]
    sums = high, (exact - high).float()
    return _Decays(raw, rate, steps, sums, from_start, to_end, through.contiguous(), documents.contiguous())


def _constants(inputs: ScanInputs) -> dict[str, Any]:
    """Return the constants of the kernels that compute tiles, and how Triton compiles them."""
    channels, size = inputs.x.shape[3], inputs.b.shape[3]
    return {
        "P": channels,
        "N": size,
        "P_LANES": max(16, triton.next_power_of_2(channels)),
        "N_LANES": max(16, triton.next_power_of_2(size)),
        "CHUNK": inputs.chunk,
        "BLOCK": min(_POSITIONS, max(16, triton.next_power_of_2(inputs.chunk))),
        "PRECISION": "ieee" if inputs.x.dtype == torch.float32 else "tf32",
        # A tile and its accumulators in the registers of eight warps, and one load ahead of the products.
        "num_warps": 8,
        "num_stages": 2,
    }


def _states(
    values: Tensor, factors: Tensor, keys: Tensor, through: Tensor, constants: dict[str, Any], *, reverse: bool
) -> Tensor:
    """Return the state before each chunk (B, M, H, P, N); if `reverse`, the gradient of the state after each chunk."""
    rows, length, heads, channels = values.shape
    groups, size = keys.shape[2:]
    chunks = through.shape[1]
    states = through.new_empty(rows, chunks, heads, channels, size)
    sum_outer[chunks, heads, rows](values, factors, keys, states, length, heads, groups, **constants)
    numbers = channels * size
    block = min(_STATE_NUMBERS, triton.next_power_of_2(numbers))
    grid = heads, rows, triton.cdiv(numbers, block)
    pass_states[grid](states, through, chunks, heads, numbers, REVERSE=reverse, BLOCK=block)
    return states


def takes(inputs: ScanInputs) -> bool:
    """Return True if the kernels can compute `inputs`: not float64, not empty, and states that fit into a program."""
    return inputs.x.dtype != torch.float64 and inputs.x.numel() > 0 and max(inputs.x.shape[3], inputs.b.shape[3]) <= 256


def scan(inputs: ScanInputs) -> Tensor:
    """Return y (B, S, H, P), as `kumi.nn.mamba_scan.SCAN` does."""
    x, b, c = (value.contiguous() for value in inputs[:3])
    rows, length, heads, _ = x.shape
    decays, constants = _prepare(inputs), _constants(inputs)
    states = _states(x, decays.steps * decays.to_end, b, decays.through, constants, reverse=False)
    out = torch.empty_like(x)
    chunks = decays.through.shape[1]
    scan_chunks[_tiles(chunks, constants), heads, rows](
        x,
        b,
        c,
        inputs.d,
        decays.steps,
        *decays.sums,
        decays.from_start,
        decays.documents,
        states,
        out,
        length,
        heads,
        b.shape[2],
        chunks,
        **constants,
    )
    return out


def scan_backward(grad: Tensor, inputs: ScanInputs) -> Sequence[Tensor]:
    """Return the gradients of x, b, c, dt, dt_bias, a_log and d, as `kumi.nn.mamba_scan.SCAN_BACKWARD` does."""
    grad, x, b, c = (value.contiguous() for value in (grad, *inputs[:3]))
    rows, length, heads, _ = x.shape
    decays, constants = _prepare(inputs), _constants(inputs)
    steps, chunks, groups = decays.steps, decays.through.shape[1], b.shape[2]
    states = _states(x, steps * decays.to_end, b, decays.through, constants, reverse=False)
    grad_states = _states(grad, decays.from_start, c, decays.through, constants, reverse=True)
    grad_x, grad_b, grad_c = torch.empty_like(x), torch.empty_like(b), torch.empty_like(c)
    grad_sums, dots = torch.empty_like(steps), steps.new_empty(4, *steps.shape)
    constants["BLOCK"] = min(constants["BLOCK"], _GRADIENT_POSITIONS)
    grid, sizes = (_tiles(chunks, constants), groups, rows), (length, heads, groups, chunks)
    query_gradients[grid](
        grad,
        x,
        b,
        c,
        steps,
        *decays.sums,
        decays.from_start,
        decays.documents,
        states,
        grad_c,
        grad_sums,
        *sizes,
        **constants,
    )
    key_gradients[grid](
        grad,
        x,
        b,
        c,
        inputs.d,
        steps,
        *decays.sums,
        decays.to_end,
        decays.documents,
        grad_states,
        grad_x,
        grad_b,
        dots,
        *sizes,
        dots.stride(0),
        **constants,
    )
    grad_steps, written, skipped, passed = dots
    # The gradient of the sum at a position: what its own result contributes, minus what other results get from the
    # position. The sum at the chunk's end gets what all positions and the state before the chunk contribute to the
    # state after it.
    grad_sums -= passed + written
    carried = torch.linalg.vecdot(states.flatten(-2), grad_states.flatten(-2))
    grad_sums[:, :, -1] += written.sum(2) + decays.through * carried
    grad_products = grad_sums.flip(2).cumsum(2).flip(2)
    grad_rate = (grad_products * steps).sum((0, 1, 2))
    grad_steps = (grad_steps + grad_products * decays.rate).flatten(1, 2)[:, :length]
    step = F.softplus(decays.raw)
    grad_dt = grad_steps * torch.sigmoid(decays.raw) * ((step >= inputs.low) & (step <= inputs.high))
    small = (grad_dt, grad_dt.sum((0, 1)), grad_rate * decays.rate, skipped.sum((0, 1, 2)))
    return [grad_x, grad_b, grad_c, *(value.to(like.dtype) for value, like in zip(small, inputs[3:7], strict=True))]


def _tiles(chunks: int, constants: dict[str, Any]) -> int:
    return int(chunks * triton.cdiv(constants["CHUNK"], constants["BLOCK"]))
