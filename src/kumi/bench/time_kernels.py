"""The kernels of a train step to time on a device: matmuls, element-wise operations, attention, launches, the update.

The kernels call the same functions as training (`kumi.nn`, `kumi.parallel.optim`), on tensors of realistic sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from kumi.bench.clock import Work
from kumi.nn import rope
from kumi.nn.attention.attention_context import Segments, segments
from kumi.nn.attention.grouped_query import attend
from kumi.nn.linear import Linear
from kumi.nn.logprob import weighted_sum
from kumi.nn.mlp import swiglu
from kumi.nn.norm import RMSNorm
from kumi.parallel.optim.adamw import init_adamw
from kumi.plan.time.op_costs import MEMORY_PASSES
from kumi.spec.engine import KUMI
from kumi.spec.op import Dim, Op
from kumi.spec.optim import Optim
from kumi.spec.precision import ITEMSIZE

Forward = Callable[[], Tensor]


@dataclass(frozen=True)
class Kernel:
    """A kernel to time.

    `kind`: product, linear, read, element-wise, attention, copy, update or launch.
    `dtype`: the dtype of the computation.
    `what`: the shape or variant, for display.
    `amount`: FLOPs per call of products, layers and attention, bytes of others, 1 for a launch.
    `prepare`: allocate the tensors and return the function to time.
    `tokens`: the tokens of a document, for attention. `rows`: the rows of the products that read weights.
    """

    kind: str
    dtype: str
    what: str
    amount: float
    prepare: Callable[[], Work]
    tokens: int = 0
    rows: int = 0


@dataclass(frozen=True)
class Sizes:
    """Sizes of the kernels: large enough to fill the device, small enough to take seconds.

    `squares`: M of products y (M, N) = x (M, K) w (N, K)^T with M = N = K.
    `peak`: M of the largest square, for which the products of the backward pass are timed too.
    `shapes`: (M, N, K) of other products.
    `linears`: (M, N, K) of linear layers, forward and backward.
    `reads`: (N, K) of the weights of products of few rows.
    `copy`: elements of the copied tensor.
    `tokens`, `hidden`, `vocab`: sizes of element-wise operations.
    `attention`: (sequences, positions, query heads, key heads, head size), the shortest sequences first. The speed of a
      CPU depends on their length; long ones are few and have few heads, so that none takes more than a second or two.
    `update`: parameters of the optimizer update.
    """

    squares: tuple[int, ...]
    peak: int
    shapes: tuple[tuple[int, int, int], ...]
    linears: tuple[tuple[int, int, int], ...]
    reads: tuple[tuple[int, int], ...]
    copy: int
    tokens: int
    hidden: int
    vocab: int
    attention: tuple[tuple[int, int, int, int, int], ...]
    update: int


# The first `shapes` occur in layers; the sizes of the last ones are not divisible by any tile.
SIZES = {
    "cpu": Sizes(
        squares=(64, 128, 256, 512, 1024),
        peak=2048,
        shapes=(
            (1024, 256, 256),
            (1024, 768, 256),
            (1024, 256, 768),
            (2048, 1024, 384),
            (2048, 384, 1024),
            (1024, 128, 256),
            (1000, 1001, 1001),
            (1024, 1023, 1023),
        ),
        linears=((1024, 256, 256), (1024, 768, 256), (1024, 256, 768), (2048, 1024, 384)),
        reads=8 * ((512, 512), (1024, 512), (512, 1024), (2048, 512)),
        copy=2**24,
        tokens=2048,
        hidden=512,
        vocab=4096,
        attention=(
            (8, 128, 4, 2, 128),
            (4, 256, 4, 2, 128),
            (2, 512, 4, 2, 128),
            (1, 2048, 4, 2, 128),
            (1, 8192, 2, 1, 128),
        ),
        update=2**22,
    ),
    "cuda": Sizes(
        squares=(256, 512, 1024, 2048, 4096),
        peak=8192,
        shapes=(
            (4096, 4096, 1024),
            (8192, 1024, 4096),
            (8192, 14336, 4096),
            (8192, 4096, 14336),
            (1024, 4096, 4096),
            (8192, 10922, 4096),
            (8192, 10944, 4096),
            (8192, 8191, 8191),
        ),
        linears=((8192, 4096, 4096),),
        reads=4 * ((4096, 4096), (14336, 4096), (4096, 14336)),
        copy=2**28,
        tokens=8192,
        hidden=4096,
        vocab=32768,
        attention=((2, 4096, 32, 8, 128),),
        update=2**26,
    ),
}


def kernels(device: torch.device, dtypes: tuple[str, ...], main: str, *, quick: bool) -> Iterator[Kernel]:
    """Yield the kernels to time on `device` in each of `dtypes`.

    `main`: the dtype in which training computes.
    `quick`: leave out most shapes of products and long attention; in dtypes other than `main`, time only products and
    linear layers.
    """
    sizes = SIZES[device.type]
    yield _launch(device)
    yield _copy(device, sizes.copy)
    yield _update(device, sizes.update)
    for dtype in dtypes:
        yield from _products(device, dtype, sizes, quick=quick)
        for linear in sizes.linears:
            yield _linear(device, dtype, linear)
        yield _read(device, dtype, sizes.reads)
        if quick and dtype != main:
            continue
        yield from _element_wise(device, dtype, sizes)
        if dtype == main and (device.type == "cpu" or dtype != "float32"):  # CUDA has no fused attention for float32
            for shape in sizes.attention:
                if not quick or shape[1] <= QUICK_TOKENS:
                    yield from _attention(device, dtype, shape)


# The longest sequences of attention in a quick measurement.
QUICK_TOKENS = 4096


def _products(device: torch.device, dtype: str, sizes: Sizes, *, quick: bool) -> Iterator[Kernel]:
    """Yield the products of the largest square in all FORMS, and the products of other shapes in the forward form."""
    peak = sizes.peak
    for form in FORMS:
        yield _product(device, dtype, (peak, peak, peak), form)
    squares = [(size, size, size) for size in sizes.squares]
    for shape in [squares[-1], sizes.shapes[0]] if quick else [*squares, *sizes.shapes]:
        yield _product(device, dtype, shape, "forward")


def _linear(device: torch.device, dtype: str, shape: tuple[int, int, int]) -> Kernel:
    """Time the forward and backward of a linear layer: three matmuls, the casts of its weight, autograd's overhead."""
    m, n, k = shape

    def make(x: Tensor) -> Forward:
        layer = Linear(k, n, bias=False, device=device, dtype=torch.float32)
        torch.nn.init.normal_(layer.weight)

        def forward() -> Tensor:
            layer.weight.grad = None
            out: Tensor = layer(x)
            return out

        return forward

    prepare = partial(_forward_backward, make, device, dtype, (m, k))
    return Kernel("linear", dtype, f"{m}x{n}x{k}", 6.0 * m * n * k, prepare)


# The three matmuls of a linear layer: y = x w^T, and the gradients dy w and dy^T x.
FORMS = ("forward", "backward input", "backward weight")


def _product(device: torch.device, dtype: str, shape: tuple[int, int, int], form: str) -> Kernel:
    """Time the matmul `form` (one of FORMS) of a linear layer with the shape (M, N, K)."""
    m, n, k = shape

    def prepare() -> Work:
        x, w, dy = (_random(device, dtype, rows, columns) for rows, columns in ((m, k), (n, k), (m, n)))
        left, right = {"forward": (x, w.T), "backward input": (dy, w), "backward weight": (dy.T, x)}[form]
        out = left @ right
        return lambda: torch.mm(left, right, out=out)

    return Kernel("product", dtype, f"{form} {m}x{n}x{k}", 2.0 * m * n * k, prepare)


# Rows of the products that read weights: the sequences of a small batch in generation.
READ_ROWS = 8


def _read(device: torch.device, dtype: str, shapes: tuple[tuple[int, int], ...]) -> Kernel:
    """Time linear layers of few rows, one after another, as in a decode step; `amount` is the bytes of the weights.

    Together the weights are larger than a cache, as those of a model are.
    """

    def prepare() -> Work:
        options = {"bias": False, "device": device, "dtype": getattr(torch, dtype)}
        inputs = {k: _random(device, dtype, READ_ROWS, k) for _, k in shapes}
        layers = [(Linear(k, n, **options), inputs[k]) for n, k in shapes]
        for layer, _ in layers:
            torch.nn.init.normal_(layer.weight)

        @torch.no_grad()
        def work() -> None:
            for layer, x in layers:
                layer(x)

        return work

    size = float(ITEMSIZE[dtype] * sum(n * k for n, k in shapes))
    return Kernel("read", dtype, f"{len(shapes)} weights, {READ_ROWS} rows", size, prepare, rows=READ_ROWS)


def _launch(device: torch.device) -> Kernel:
    """Time operations on one element: the interval between kernel launches."""

    def prepare() -> Work:
        element = torch.ones(1, device=device)
        return lambda: element.mul_(1.0)

    return Kernel("launch", "float32", "one element", 1.0, prepare)


def _copy(device: torch.device, count: int) -> Kernel:
    """Time a copy; every byte is read and written."""

    def prepare() -> Work:
        source, target = _random(device, "float32", count), torch.empty(count, device=device)
        return lambda: target.copy_(source)

    return Kernel("copy", "float32", f"{4 * count >> 20} MiB", 8.0 * count, prepare)


def _update(device: torch.device, count: int) -> Kernel:
    """Time the fused AdamW update: it reads and writes the parameter and two moments, and reads the gradient."""

    def prepare() -> Work:
        parameter = nn.Parameter(_random(device, "float32", count))
        parameter.grad = _random(device, "float32", count)
        return init_adamw([("weight", parameter)], ("weight",), Optim()).step

    return Kernel("update", "float32", f"{count >> 20} Mi parameters", 28.0 * count, prepare)


def _element_wise(device: torch.device, dtype: str, sizes: Sizes) -> Iterator[Kernel]:
    """Time a layer's element-wise operations, forward and backward; `amount` is the planner's count of bytes."""
    tokens, hidden = sizes.tokens, sizes.hidden
    shape = {"rope": (1, tokens, hidden // 128, 128)}
    for kind, forward in ELEMENT_WISE.items():
        passes = sum(MEMORY_PASSES[kind][KUMI.kernels][:2])
        amount = float(passes * ITEMSIZE[dtype] * tokens * hidden)
        prepare = partial(_forward_backward, forward, device, dtype, shape.get(kind, (tokens, hidden)))
        yield Kernel("element-wise", dtype, f"{kind} {tokens}x{hidden}", amount, prepare)
    yield _logits(device, dtype, tokens, sizes.vocab)


def _logits(device: torch.device, dtype: str, tokens: int, vocab: int) -> Kernel:
    """Time the loss and its gradient; the hidden states are so narrow that the head's matmuls are negligible."""

    def prepare() -> Work:
        hidden, head = (_random(device, dtype, rows, _NARROW, grad=True) for rows in (tokens, vocab))
        labels = torch.arange(tokens, device=device) % vocab
        weights = torch.full((tokens,), 1 / tokens, device=device)

        def work() -> None:
            hidden.grad = head.grad = None
            torch.autograd.backward(weighted_sum(hidden, head, labels, weights)[0])

        return work

    amount = float(sum(MEMORY_PASSES["logits"][KUMI.kernels][:2]) * ITEMSIZE[dtype] * tokens * vocab)
    return Kernel("element-wise", dtype, f"logits {tokens}x{vocab}", amount, prepare)


# Width of the hidden states in `_logits`.
_NARROW = 8


def _add(x: Tensor) -> Forward:
    other = torch.ones_like(x, requires_grad=True)
    return lambda: x + other


def _gate(x: Tensor) -> Forward:
    up = torch.ones_like(x, requires_grad=True)
    return lambda: swiglu(x, up)


def _norm(x: Tensor) -> Forward:
    module = RMSNorm(x.shape[-1], 1e-5, device=x.device, dtype=torch.float32)
    torch.nn.init.ones_(module.weight)
    return lambda: module(x)


def _rope(x: Tensor) -> Forward:
    angles = torch.ones(1, x.shape[1], 1, x.shape[3], device=x.device)
    return lambda: rope.rotate(x, angles, angles)


# Kind of operation in the ledger, the list of a model's operations (`kumi.spec.ledger`) -> function that builds its
# forward pass from an input.
ELEMENT_WISE: dict[str, Callable[[Tensor], Forward]] = {"add": _add, "gate": _gate, "norm": _norm, "rope": _rope}


def _forward_backward(
    make: Callable[[Tensor], Forward], device: torch.device, dtype: str, shape: tuple[int, ...]
) -> Work:
    """Return a function that runs forward and backward; each call replaces the gradients of the previous call."""
    x = _random(device, dtype, *shape, grad=True)
    forward = make(x)
    grad = torch.ones_like(forward())

    def work() -> None:
        x.grad = None
        torch.autograd.backward(forward(), grad)

    return work


def _attention(device: torch.device, dtype: str, shape: tuple[int, int, int, int, int]) -> Iterator[Kernel]:
    """Time causal attention; `amount` counts the FLOPs of unmasked pairs, and 2.5 times as many for the backward."""
    rows, length, heads, kv_heads, size = shape
    width = Dim("heads", heads * size)
    flops = 4.0 * rows * length * width.size * Op("", "attention", width, width).reach(length)
    what = f"{rows}x{length}, {heads} heads of {size}"

    def inputs(*, grad: bool) -> list[Tensor]:
        return [_random(device, dtype, rows, length, count, size, grad=grad) for count in (heads, kv_heads, kv_heads)]

    def single_documents() -> Segments:
        return segments(torch.zeros(rows, length, dtype=torch.int64, device=device), None)

    def forward() -> Work:
        q, k, v = inputs(grad=False)
        context = single_documents()
        return lambda: attend(context, q, k, v, None)

    def backward() -> Work:
        q, k, v = inputs(grad=True)
        out = attend(single_documents(), q, k, v, None)
        grad = torch.ones_like(out)
        return lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True)

    yield Kernel("attention", dtype, f"forward {what}", flops, forward, length)
    yield Kernel("attention", dtype, f"backward {what}", 2.5 * flops, backward, length)


def _random(device: torch.device, dtype: str, *shape: int, grad: bool = False) -> Tensor:
    """Return random numbers: matmuls of zeros draw less power, so they would run at a higher clock."""
    return torch.randn(*shape, device=device).to(getattr(torch, dtype)).requires_grad_(grad)
