"""Compare and time the kernels of `kumi.spec.numerics.KERNELS` on this device, against PyTorch's operations, and kinds
of attention.

    python -m kumi.nn.fastest_kernels cuda      the choice as JSON, from a process of its own, which may crash

A kernel is used if its results and gradients are near those of PyTorch's operations (`TOLERANCE`) and it is faster by
a factor of `LEAD`, in the median and in the fastest round. Each kernel that is rejected gives a note: it fails,
differs, is slower, or was not measured within `_SECONDS`. Kernels whose package is not installed give none. The times
are of forward and backward of one operation with the sizes of a model of some billion parameters (`Sizes`).
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from kumi.accelerator import can, is_gpu, refuse
from kumi.compat import activate_flash, restore_flash
from kumi.errors import ConfigError
from kumi.nn.attention.attention_context import segments
from kumi.nn.attention.grouped_query import attend
from kumi.nn.attention.newer_flash import installed_version
from kumi.nn.fastest_numerics import LEAD
from kumi.nn.logprob import weighted_sum
from kumi.nn.mamba_scan import ScanInputs, scan
from kumi.nn.moe import gather_weighted, sorted_places, spread
from kumi.nn.numerics import use_kernels
from kumi.nn.rope import rotate
from kumi.spec.numerics import KERNEL_PACKAGES, KERNELS, Numerics

_ROUNDS = 5
# Matrix products that a GPU computes while the host starts an operation's kernels: 6 ms of an H100, and more of others.
_FILLERS = 4
_SECONDS = 20.0
# Largest distance of a result or gradient from that of PyTorch's operations, as a fraction of the latter's norm.
# Results in bfloat16 that are only rounded in another order are nearer.
TOLERANCE = 0.02

# What a kernel that does not fit the device, the sizes or the versions raises.
_FAILURES = (ConfigError, RuntimeError, ValueError, AssertionError, TypeError, ImportError)

Function = Callable[[], list[Tensor]]


class Sizes(NamedTuple):
    """Sizes of the operations that are timed, and the dtype of their inputs."""

    tokens: int = 4096
    hidden: int = 2048
    vocabulary: int = 65536
    experts: int = 64
    choices: int = 8
    heads: int = 32
    head: int = 128
    state: int = 128
    chunk: int = 256
    dtype: torch.dtype = torch.bfloat16


class KernelChoice(NamedTuple):
    """The chosen kernels, the median seconds by operation and implementation, and a note for each rejected kernel."""

    numerics: Numerics
    seconds: dict[str, dict[str, float]]
    notes: list[str]


def measure_kernels(device: torch.device, sizes: Sizes | None = None, seconds: float = _SECONDS) -> KernelChoice:
    """Return the kernels that are right and fastest on `device`. The first implementation that leads is chosen."""
    torch.manual_seed(0)
    until, chosen, times, notes = time.perf_counter() + seconds, [], {}, []
    for operation, function in _operations(device, sizes or Sizes()).items():
        use_kernels(())
        expected, times[operation] = function(), {"torch": 0.0}
        reference = _device_rounds(function, device)
        times[operation]["torch"] = median(reference)
        for implementation in KERNELS[operation]:
            name = f"{operation}:{implementation}"
            if find_spec(KERNEL_PACKAGES[implementation][0].replace("-", "_")) is None:
                continue
            if time.perf_counter() > until:
                notes.append(f"{name} was not measured within {seconds:g} s, and is not used")
                continue
            try:
                use_kernels(((operation, implementation),))
                far = distance(function(), expected)
                own = _device_rounds(function, device)
            except _FAILURES as error:
                notes.append(f"{name} fails ({type(error).__name__}: {str(error)[:200]}), and is not used")
                continue
            times[operation][implementation] = median(own)
            if note := why_not(name, far, own, reference):
                notes.append(note)
            else:
                chosen.append((operation, implementation))
                break
    use_kernels(())
    if can(device, "packed flash attention"):
        kind, times["attention"], about = measure_attention(device, sizes or Sizes(), until)
        chosen += [] if kind is None else [("attention", kind)]
        notes += about
    return KernelChoice(Numerics(kernels=tuple(chosen)), times, notes)


def measure_attention(
    device: torch.device, sizes: Sizes, until: float
) -> tuple[str | None, dict[str, float], list[str]]:
    """Return the kind of attention to use (see `ATTENTION`; None for PyTorch's flash kernel), seconds, and notes.

    Attention with masks of all pairs is the plain path. It is chosen only where PyTorch's kernel fails or is wrong,
    for its memory grows with the square of the length.
    """
    function, times, notes = _attention(device, sizes), {}, []
    try:
        refuse("packed flash attention", refused=True)
        expected, times["masked"] = function(), median(_device_rounds(function, device))
    finally:
        refuse("packed flash attention", refused=False)
    try:
        far = distance(function(), expected)
        reference = _device_rounds(function, device)
        times["torch"] = median(reference)
        wrong = "" if far <= TOLERANCE else f"differs from attention with masks by {far:.2g} of the result"
    except _FAILURES as error:
        wrong = f"fails ({type(error).__name__}: {str(error)[:200]})"
    if wrong:
        note = f"PyTorch's flash attention {wrong}; attention uses masks, whose memory grows with the square of a row"
        return "masked", times, [note]
    version = installed_version(device)
    if version is None or time.perf_counter() > until:
        notes += [] if version is None else [f"attention:{version.lower()} was not measured in time, and is not used"]
        return None, times, notes
    name = f"attention:{version.lower()}"
    try:
        activate_flash(version)
        far, own = distance(function(), expected), _device_rounds(function, device)
    except _FAILURES as error:
        notes.append(f"{name} fails ({type(error).__name__}: {str(error)[:200]}), and is not used")
        return None, times, notes
    finally:
        restore_flash()
    times[version.lower()] = median(own)
    if note := why_not(name, far, own, reference):
        return None, times, [note]
    return version.lower(), times, notes


def why_not(name: str, far: float, own: list[float], reference: list[float], tolerance: float = TOLERANCE) -> str:
    """Return why a candidate is not used, as a sentence; "" if it is near the reference and faster."""
    if not far <= tolerance:  # not a number is not near, either
        return f"{name} differs from PyTorch's operations by {far:.2g} of the result; not used"
    if any(statistic(own) * LEAD > statistic(reference) for statistic in (median, min)):
        share = median(own) / median(reference)
        return f"{name} takes {share:.2f} times as long as PyTorch's operations, so it is not 5 % faster, and not used"
    return ""


def timed_rounds(function: Function, device: torch.device) -> list[float]:
    """Return the seconds of each round of `function`, from its start until the device has ended it."""
    seconds = []
    for _ in range(_ROUNDS):
        _wait(device)
        began = time.perf_counter()
        function()
        _wait(device)
        seconds.append(time.perf_counter() - began)
    return seconds


def _device_rounds(function: Function, device: torch.device) -> list[float]:
    """Return the seconds of each round of `function` on the device alone, as in a step whose kernels it has queued.

    A GPU ends a small operation sooner than the host starts its kernels: the rotation of 4096 tokens took 0.58 ms on an
    H100 with any implementation, by the host's clock. So the GPU multiplies matrices while the host starts the
    kernels.
    """
    if not is_gpu(device):
        return timed_rounds(function, device)
    matrix, seconds = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16), []
    for _ in range(_ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        for _ in range(_FILLERS):
            matrix @ matrix
        begin.record()
        function()
        end.record()
        _wait(device)
        seconds.append(begin.elapsed_time(end) / 1e3)
    return seconds


def _wait(device: torch.device) -> None:
    if is_gpu(device):
        torch.cuda.synchronize(device)


def distance(results: list[Tensor], expected: list[Tensor]) -> float:
    """Return the largest distance of a result from the expected one, as a fraction of the latter's norm; NaN if a
    result has NaN."""
    pairs = [(result.double(), reference.double()) for result, reference in zip(results, expected, strict=True)]
    distances = [(a - b).norm() / b.norm().clamp(min=1e-9) for a, b in pairs]
    return torch.stack(distances).amax().item()


def _operations(device: torch.device, sizes: Sizes) -> Mapping[str, Function]:
    """Return for each operation of `KERNELS` a function that computes its results and gradients."""
    tokens, hidden = sizes.tokens, sizes.hidden

    def leaf(*shape: int, dtype: torch.dtype = sizes.dtype) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype).requires_grad_()

    def loss() -> Function:
        states, weight = leaf(tokens, hidden), leaf(sizes.vocabulary, hidden)
        labels = torch.randint(0, sizes.vocabulary, (tokens,), device=device)
        token_weights = torch.full((tokens,), 1 / tokens, device=device)

        def run() -> list[Tensor]:
            total, log_probs = weighted_sum(states, weight, labels, token_weights)
            return [log_probs, *torch.autograd.grad(total, (states, weight))]

        return run

    def experts() -> Function:
        x, weights = leaf(tokens, hidden), leaf(tokens, sizes.choices, dtype=torch.float32)
        ids = torch.rand(tokens, sizes.experts, device=device).topk(sizes.choices, dim=-1).indices
        places, grad = sorted_places(ids), torch.randn(tokens, hidden, device=device, dtype=sizes.dtype)

        def run() -> list[Tensor]:
            out = gather_weighted(spread(x, places), weights, places)
            return [out, *torch.autograd.grad(out, (x, weights), grad)]

        return run

    def rotation() -> Function:
        x = leaf(1, tokens, sizes.heads, sizes.head)
        angles = torch.rand(1, tokens, 1, sizes.head, device=device)
        cos, sin, grad = angles.cos(), angles.sin(), torch.randn_like(x)

        def run() -> list[Tensor]:
            out = rotate(x, cos, sin)
            return [out, *torch.autograd.grad(out, x, grad)]

        return run

    def recurrence() -> Function:
        x, dt = leaf(1, tokens, sizes.heads, sizes.head // 2), leaf(1, tokens, sizes.heads)
        b, c = (leaf(1, tokens, 1, sizes.state) for _ in range(2))
        dt_bias, a_log, d = (leaf(sizes.heads, dtype=torch.float32) for _ in range(3))
        inputs = ScanInputs(x, b, c, dt, dt_bias, a_log, d, None, sizes.chunk, 0.0, float("inf"))
        leaves = x, b, c, dt, dt_bias, a_log, d
        grad = torch.randn_like(inputs.x)

        def run() -> list[Tensor]:
            y = scan(inputs)
            return [y, *torch.autograd.grad(y, leaves, grad)]

        return run

    return {"loss": loss(), "experts": experts(), "rotation": rotation(), "scan": recurrence()}


def _attention(device: torch.device, sizes: Sizes) -> Function:
    """Return a function that computes attention over four documents of different lengths, and its gradients."""
    tokens = sizes.tokens
    lengths = [tokens // 2, tokens // 4, tokens // 8, tokens - tokens // 2 - tokens // 4 - tokens // 8]
    ids = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths))[None].to(device)
    context, kv_heads = segments(ids, ids), max(1, sizes.heads // 4)
    q, k, v = (
        torch.randn(1, tokens, heads, sizes.head, device=device, dtype=sizes.dtype).requires_grad_()
        for heads in (sizes.heads, kv_heads, kv_heads)
    )
    grad = torch.randn_like(q)

    def run() -> list[Tensor]:
        out = attend(context, q, k, v, None)
        return [out, *torch.autograd.grad(out, (q, k, v), grad)]

    return run


def _print_choice(device: torch.device) -> None:
    began = time.perf_counter()
    choice = measure_kernels(device)
    took = time.perf_counter() - began
    record = {"numerics": str(choice.numerics), "seconds": choice.seconds, "notes": choice.notes, "took": took}
    print(json.dumps(record))


if __name__ == "__main__":
    _print_choice(torch.device(sys.argv[1]))
