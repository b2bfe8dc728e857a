"""The kernels of Mamba's recurrence: interpreted, against the plain path, and compiled for GPUs."""

from __future__ import annotations

import numpy as np
import torch

from kumi.nn.mamba_scan import ScanInputs, scan
from kumi.nn.numerics import use_kernels
from triton_process import check_compiled, compiled_launches, compiling, interpreted

KERNEL = (("scan", "triton"),)
# Largest difference from the plain path, of the largest value. Sums are in another order: the largest differences are
# in the gradient of a_log, whose terms nearly cancel. And where a GPU rounds to bfloat16 to nearest, the interpreter
# cuts off, up to 2^-7.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2**-6}
# (sequences, positions, heads, channels, groups, state, chunk): one position; rows shorter than a chunk; a shorter
# last chunk; sizes that are no powers of two; chunks of several tiles of 64, the last one not full.
SHAPES = [(1, 1, 1, 1, 1, 1, 4), (2, 5, 2, 3, 1, 5, 8), (2, 21, 6, 5, 3, 4, 8), (1, 150, 2, 8, 1, 20, 72)]


def inputs(shape, dtype, documents, *, strong=0.0):
    rows, length, heads, channels, groups, state, chunk = shape
    random = torch.Generator().manual_seed(sum(shape))

    def leaf(*sizes, of=dtype):
        return torch.randn(sizes, generator=random).to(of).requires_grad_()

    numbers = (torch.rand(rows, length, generator=random) < 0.15).long().cumsum(1) if documents else None
    parts = leaf(rows, length, groups, state), leaf(rows, length, groups, state), leaf(rows, length, heads)
    a_log = (torch.randn(heads, generator=random) + strong).requires_grad_()
    parameters = leaf(heads, of=torch.float32), a_log, leaf(heads, of=torch.float32)
    return ScanInputs(leaf(rows, length, heads, channels), *parts, *parameters, numbers, chunk, 0.3, 1.5)


def both(given):
    """Return y and the gradients of the seven inputs."""
    y = scan(given)
    towards = torch.randn(y.shape, generator=torch.Generator().manual_seed(0)).to(y.dtype)
    return [y, *torch.autograd.grad(y, given[:7], towards)]


def differences(results, expected):
    """Return the largest difference of each result from the expected one, of the largest value."""
    pairs = zip(results, expected, strict=True)
    return [((a.double() - b.double()).abs().max() / b.abs().max().clamp(min=1)).item() for a, b in pairs]


@interpreted
def test_equal_to_the_plain_path():
    cases = [(shape, torch.float32, documents) for shape in SHAPES for documents in (False, True)]
    for shape, dtype, documents in [*cases, (SHAPES[1], torch.bfloat16, True)]:
        given = inputs(shape, dtype, documents)
        use_kernels(())
        expected = both(given)
        use_kernels(KERNEL)
        results = both(given)
        assert [value.dtype for value in results] == [value.dtype for value in expected]
        assert max(differences(results, expected)) <= TOLERANCE[dtype]


@interpreted
def test_strong_decay():
    """Rates of -e^6: sums of thousands, whose differences decide, and gradients that nearly cancel.

    The kernels are at most three times as far from float64 as the plain path in float32.
    """
    given = inputs(SHAPES[1], torch.float32, False, strong=6.0)
    exact = both(ScanInputs(*(value.detach().double().requires_grad_() for value in given[:7]), *given[7:]))
    use_kernels(())
    plain = differences(both(given), exact)
    use_kernels(KERNEL)
    for error, plain_error in zip(differences(both(given), exact), plain, strict=True):
        assert error <= 3 * plain_error + 1e-5


@interpreted
def test_sums_do_not_keep_the_rounding_of_products():
    """The gradients of steps and rates are sums over a chunk whose terms nearly cancel.

    On a GPU, products of bfloat16 inputs have operands in TF32, here in the interpreter as well. Their rounding must
    cancel with the terms: on an H100 the gradient of a_log was once wrong by 20 % of its norm.
    """
    from triton.runtime import interpreter

    def dot_in_tf32(self, a, b, accumulator, *precision):
        a, b = ((value.data.astype(np.float32).view(np.uint32) & 0xFFFFE000).view(np.float32) for value in (a, b))
        return interpreter.TensorHandle(a @ b + accumulator.data, accumulator.dtype.scalar)

    given = inputs((1, 512, 4, 16, 1, 32, 256), torch.bfloat16, False)._replace(low=0.0, high=float("inf"))
    exact = both(ScanInputs(*(value.detach().double().requires_grad_() for value in given[:7]), *given[7:]))
    use_kernels(KERNEL)
    interpreter.InterpreterBuilder.create_dot = dot_in_tf32
    results = both(given)
    for name in ("dt_bias", "a_log"):
        index = 1 + ScanInputs._fields.index(name)
        error = (results[index].double() - exact[index]).norm() / exact[index].norm()
        assert error <= 1e-2, name


@compiling
def test_compiled_for_gpus():
    use_kernels(KERNEL)
    with compiled_launches() as launches:
        both(inputs((1, 300, 4, 64, 2, 128, 256), torch.bfloat16, True))
    check_compiled(launches, {"sum_outer", "pass_states", "scan_chunks", "query_gradients", "key_gradients"})
