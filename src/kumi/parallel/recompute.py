"""Activation recomputation: of complete layers, or selectively of cheap large activations.

The replay is the second run of a layer's forward, during the backward pass.

Selective recomputation saves the results of matmuls, attention kernels and collectives, and recomputes element-wise
operations (norms, rotations, SwiGLU), which are large in bytes and small in FLOPs. Korthikanti et al., 2022,
arXiv:2205.05198, recompute the attention core. Flash attention keeps no scores, so its output is saved here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from kumi.compat import VARLEN_ATTENTION
from kumi.nn.attention.chunked_attention import CHUNKED_ATTENTION
from kumi.nn.attention.cpu_attention import PACKED_ATTENTION
from kumi.nn.attention.cpu_flash import FLASH_ATTENTION
from kumi.nn.grouped_gemm import GROUPED_MATMUL
from kumi.nn.mamba_scan import SCAN
from kumi.parallel.async_tp import ALL_GATHER_MATMULS, MATMUL_REDUCE_SCATTER
from kumi.parallel.expert_parallel import EXCHANGE_COUNTS, EXCHANGE_ROWS
from kumi.parallel.ring_attention import RING_ATTENTION
from kumi.parallel.tensor_parallel import COLUMN_LINEARS, ROW_LINEAR
from kumi.parallel.token_collectives import ALL_REDUCE, REDUCE_SCATTER
from kumi.parallel.ulysses import ALL_TO_ALL

_aten = torch.ops.aten
SAVED_OPS = (
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
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
# Operators by name: importing the module that defines them takes longer than the other imports together.
SAVED_OP_NAMES = (VARLEN_ATTENTION,)


@dataclass
class NotReplayed:
    """`on` is True during operations that the replay neither repeats nor looks up, because they differ the second
    time."""

    on: bool = False


class Recompute:
    """A wrapper for `layer.wrappers` that recomputes the layer in the backward pass.

    `mode`: "selective" or "full". FSDP's hooks on the layer run outside of the wrapper. For a part of the layer that is
    an FSDP unit by itself, call `leave_out`.
    """

    def __init__(self, mode: str) -> None:
        self.not_replayed = NotReplayed()
        # A decoder draws no random numbers from PyTorch's generators.
        self.options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
        if mode == "selective":
            self.options["context_fn"] = partial(_contexts, self.not_replayed)

    def __call__(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return inner(*args, **kwargs)
        return checkpoint(inner, *args, **self.options, **kwargs)

    def leave_out(self, module: nn.Module) -> None:
        """Do not replay the hooks of `module`, a part of the layer: they all-gather and free its parameters."""
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key, hook in hooks.items():
                hooks[key] = partial(_run_not_replayed, self.not_replayed, hook)


def _run_not_replayed(not_replayed: NotReplayed, hook: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    before, not_replayed.on = not_replayed.on, True
    try:
        return hook(*args, **kwargs)
    finally:
        not_replayed.on = before


def _contexts(not_replayed: NotReplayed) -> tuple[Any, Any]:
    """Return PyTorch's selective modes of the forward and the replay, without operations that are not replayed."""
    modes: tuple[Any, Any] = create_selective_checkpoint_contexts(_policy)  # type: ignore[no-untyped-call]
    for mode in modes:
        kind = type(mode)

        def dispatch(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None, kind: Any = kind) -> Any:
            if not_replayed.on:
                return func(*args, **(kwargs or {}))
            return kind.__torch_dispatch__(self, func, types, args, kwargs)

        mode.__class__ = type(kind.__name__, (kind,), {"__torch_dispatch__": dispatch})
    return modes


def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    saved = op in SAVED_OPS or op.name() in SAVED_OP_NAMES
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE
