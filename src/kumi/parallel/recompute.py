"""Activation recomputation: of complete layers, or selectively of cheap large activations.

The replay is the second run of a layer's forward, during the backward pass.

Selective recomputation saves the results of matmuls, attention kernels and collectives, and recomputes element-wise
operations (norms, rotations, SwiGLU), which are large in bytes and small in FLOPs. Korthikanti et al., 2022,
arXiv:2205.05198, recompute the attention core. Flash attention keeps no scores, so its output is saved here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from kumi.compat import VARLEN_ATTENTION
from kumi.nn.attention.chunked_attention import CHUNKED_ATTENTION
from kumi.nn.attention.cpu_attention import PACKED_ATTENTION
from kumi.nn.attention.cpu_flash import FLASH_ATTENTION
from kumi.nn.grouped_gemm import GROUPED_MATMUL
from kumi.nn.mamba_scan import SCAN
from kumi.parallel.async_tp import ALL_GATHER_MATMULS, MATMUL_REDUCE_SCATTER
from kumi.parallel.expert_parallel import EXCHANGE_COUNTS, EXCHANGE_ROWS
from kumi.parallel.host_values import HostValues
from kumi.parallel.ring_attention import RING_ATTENTION
from kumi.parallel.tensor_parallel import COLUMN_LINEARS, ROW_LINEAR
from kumi.parallel.token_collectives import ALL_REDUCE, REDUCE_SCATTER
from kumi.parallel.ulysses import ALL_TO_ALL

_aten = torch.ops.aten
# The operators whose results selective recomputation saves; see also `SAVED_OP_NAMES`.
SAVED_OPS = (
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten._scaled_mm.default,  # the matmul of float8
    GROUPED_MATMUL,
    SCAN,
    PACKED_ATTENTION,
    FLASH_ATTENTION,
    CHUNKED_ATTENTION,
    RING_ATTENTION,
    ALL_TO_ALL,
    COLUMN_LINEARS,
    ROW_LINEAR,
    ALL_GATHER_MATMULS,
    MATMUL_REDUCE_SCATTER,
    REDUCE_SCATTER,
    EXCHANGE_ROWS,
    EXCHANGE_COUNTS,
    ALL_REDUCE,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._flash_attention_forward.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
)
# Reductions by which float8 layers, which are compiled, find their scales. Their results are small.
_SCALES = (_aten.max.default, _aten.amax.default)
# Further saved operators, by name: importing the module that defines them takes longer than the other imports together.
SAVED_OP_NAMES = (VARLEN_ATTENTION, "flex_attention")


@dataclass
class NotReplayed:
    """`on` is True during the hooks of FSDP2 on a part of a layer: forward and replay call different operators there.

    The forward then saves no results, and the replay calls every operator.
    """

    on: bool = False


class Recompute:
    """A wrapper for `layer.wrappers` that recomputes the layer in the backward pass.

    `mode`: "selective" or "full". FSDP's hooks on the layer run outside of the wrapper. For a part of the layer that is
    an FSDP unit by itself, call `leave_out`.
    `compiled`: the layer is compiled.
    """

    def __init__(self, mode: str, *, compiled: bool = False) -> None:
        self.not_replayed = NotReplayed()
        # A decoder draws no random numbers from PyTorch's generators.
        self.options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
        if not compiled:
            self.options["context_fn"] = partial(_contexts, mode, self.not_replayed)
        elif mode == "selective":
            self.options["context_fn"] = _compiled_contexts

    def __call__(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return inner(*args, **kwargs)
        return checkpoint(inner, *args, **self.options, **kwargs)

    def leave_out(self, module: nn.Module) -> None:
        """Save no results of the hooks of `module`, a part of the layer, which all-gather and free its parameters."""
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key, hook in hooks.items():
                hooks[key] = partial(_run_not_replayed, self.not_replayed, hook)


def _run_not_replayed(not_replayed: NotReplayed, hook: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return the result of `hook`, called with `not_replayed.on` set."""
    before, not_replayed.on = not_replayed.on, True
    try:
        return hook(*args, **kwargs)
    finally:
        not_replayed.on = before


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode of one selective checkpoint, with the `results` of its saved operations in the order of the calls."""

    def __init__(self, results: deque[tuple[Any, Any]], not_replayed: NotReplayed) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.results, self.not_replayed = results, not_replayed

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: else PyTorch would hide each call from its compiler, which takes the host a tenth of a layer's
        time. The compiler sees no uncompiled layer anyway."""
        return False


class _SaveResults(_Mode):  # type: ignore[no-untyped-call]
    """The mode of the forward: appends the results of `SAVED_OPS` to `results`, in the order of the calls.

    PyTorch's own mode looks at every operation's arguments and stores an entry for each, which takes the host longer
    than the operations.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs) if kwargs else func(*args)
        if is_saved(func) and not self.not_replayed.on:
            # The result will refer to the autograd graph, and the graph to `results`: a cycle, unless detached.
            self.results.append((func, _detached(out)))
        return out


class _ReuseResults(_Mode):  # type: ignore[no-untyped-call]
    """The mode of the replay: returns the `results` of the forward instead of calling `SAVED_OPS` again."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not is_saved(func) or self.not_replayed.on:
            return func(*args, **kwargs) if kwargs else func(*args)
        saved, out = self.results.popleft() if self.results else (None, None)
        if saved is not func:
            raise RuntimeError(f"the replay of a layer calls {func}, where its forward called {saved or 'nothing'}")
        return out


def _contexts(mode: str, not_replayed: NotReplayed) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return the contexts of the forward and of the replay of one checkpoint of a layer that is not compiled."""
    host = HostValues()
    if mode != "selective":
        return host.recorded(), host.repeated()
    results: deque[tuple[Any, Any]] = deque()
    forward, replay = _SaveResults(results, not_replayed), _ReuseResults(results, not_replayed)
    return _both(forward, host.recorded()), _both(replay, host.repeated())


@contextmanager
def _both(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer, inner:
        yield


def _compiled_contexts() -> tuple[Any, Any]:
    """Return PyTorch's selective modes: its compiler reads their policy and puts none of them into a compiled layer."""
    modes: tuple[Any, Any] = create_selective_checkpoint_contexts(_policy)  # type: ignore[no-untyped-call]
    return modes


def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _SCALES or is_saved(op) else CheckpointPolicy.PREFER_RECOMPUTE


def is_saved(op: Any) -> bool:
    """Return True if selective recomputation saves the results of the operator `op`."""
    if op not in _IS_SAVED:
        _IS_SAVED[op] = op in SAVED_OPS or op.name() in SAVED_OP_NAMES
    return _IS_SAVED[op]


_IS_SAVED: dict[Any, bool] = {}


def _detached(out: Any) -> Any:
    if isinstance(out, Tensor):
        return out.detach()
    return type(out)(map(_detached, out)) if isinstance(out, tuple | list) else out
