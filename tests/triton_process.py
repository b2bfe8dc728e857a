"""Run a test of Triton kernels in a forked child: interpreted on the CPU, or with the compiler for GPUs.

Triton decides when it is imported whether kernels are interpreted, and an operator of PyTorch is defined only once in a
process. So the test process itself must not import modules of `kumi.nn.kernels`.
"""

from __future__ import annotations

import functools
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any
from unittest import mock

import pytest

from forked import run_forked

WITHOUT_TRITON = (
    "Triton is not installed, so its kernels are neither interpreted nor compiled: "
    "pip install 'kumi[kernels-check]' (690 MB), as `make test-all` does"
)
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason=WITHOUT_TRITON)


def interpreted(test: Callable[..., None]) -> Callable[..., None]:
    """Run `test` where Triton's kernels are interpreted and take tensors of the CPU."""
    return _in_child(test, "1")


def compiling(test: Callable[..., None]) -> Callable[..., None]:
    """Run `test` where Triton's kernels are compiled, which needs no GPU unless they are launched."""
    return _in_child(test, "0")


def _in_child(test: Callable[..., None], interpret: str) -> Callable[..., None]:
    @needs_triton
    @functools.wraps(test)
    def run(*args: object, **kwargs: object) -> None:
        code, _, err = run_forked(lambda: _enter(test, interpret, args, kwargs))
        assert code == 0, err[-6000:]

    return run


def _enter(test: Callable[..., None], interpret: str, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
    os.environ["TRITON_INTERPRET"] = interpret
    ours = [name for name in sys.modules if name.startswith("kumi.nn.kernels.")]
    assert not ours, f"{ours} were imported in the test process, by a test that is not `interpreted` or `compiling`"
    for name in [name for name in sys.modules if _is_library(name)]:
        del sys.modules[name]  # PyTorch's compiler may have imported it, in the other mode
    warnings.filterwarnings("error", category=RuntimeWarning)  # numbers that are not finite, in the interpreter
    if interpret == "1":
        _index_by_one_number()
    test(*args, **kwargs)


def _index_by_one_number() -> None:
    """Let loops of interpreted kernels count by tensors of one number: NumPy 2.5 refuses Triton 3.6 to convert them."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_with_index(tensor: Any, *args: Any) -> None:
        patch(tensor, *args)
        tensor.__index__ = lambda self: self.handle.data.item()

    interpreter._patch_lang_tensor = patch_with_index


def _is_library(name: str) -> bool:
    """Return True for modules of Triton that depend on the mode. Its library in C++ cannot be loaded twice."""
    return name.split(".")[0] == "triton" and not name.startswith("triton._C")


# Architectures of GPUs for which kernels are compiled, and the shared memory of a block (CUDA's programming guide).
SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}


@contextmanager
def compiled_launches(architectures: tuple[int, ...] = tuple(SHARED_MEMORY)) -> Iterator[list[tuple[str, int, Any]]]:
    """Compile the kernels that are launched inside this context, instead of running them.

    Yield a list to which each launch adds, for each of `architectures`, the kernel's name, the architecture and what
    Triton compiled: with its own specialization by these arguments, down to the machine code (cubin).
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend
    from triton.runtime.jit import JITFunction, create_function_from_signature

    launches: list[tuple[str, int, Any]] = []

    def compile_launch(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        for architecture in architectures:
            target = GPUTarget("cuda", architecture, 32)
            backend = make_backend(target)
            bind = create_function_from_signature(self.signature, self.params, backend)
            options = {"debug": False, "instrumentation_mode": "", **kwargs}
            bound = bind(*args, **options)
            packed, signature, constants, attributes = self._pack_args(backend, options, *bound)
            source = ASTSource(self, signature, constants, attributes)
            launches.append((self.fn.__name__, architecture, triton.compile(source, target, packed.__dict__)))

    with tempfile.TemporaryDirectory() as cache:
        patches = (
            mock.patch.dict(os.environ, TRITON_CACHE_DIR=cache),
            mock.patch.object(JITFunction, "run", compile_launch),
        )
        with patches[0], patches[1]:
            yield launches


def check_compiled(launches: list[tuple[str, int, Any]], names: set[str]) -> None:
    """Assert that the kernels `names` were compiled for all architectures, and fit into their shared memory."""
    assert {(name, architecture) for name, architecture, _ in launches} == {
        (name, architecture) for name in names for architecture in SHARED_MEMORY
    }
    for _, architecture, compiled in launches:
        assert f".target sm_{architecture}" in compiled.asm["ptx"]
        assert compiled.asm["cubin"][:4] == b"\x7fELF"
        assert compiled.metadata.shared <= SHARED_MEMORY[architecture]
