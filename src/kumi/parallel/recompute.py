"""What the backward pass computes again instead of keeping it: nothing, the cheap large activations, or whole layers.

Selective recomputation keeps what a matrix product or the attention kernel returned and recomputes the element-wise
rest (norms, rotations, SwiGLU products), large in bytes and small in FLOPs. Korthikanti et al., 2022, arXiv:2205.05198,
recompute the attention core; flash attention keeps no scores, so here its output is kept, as is what attention got
from other ranks.
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
from kumi.nn.attention.chunked_attention import OPERATOR as BLOCK_ATTENTION
from kumi.nn.attention.cpu_attention import OPERATOR as PACKED_ATTENTION
from kumi.nn.attention.cpu_flash import OPERATOR as FLASH_ATTENTION
from kumi.nn.grouped_gemm import TIMES as GROUPED_PRODUCTS
from kumi.nn.mamba_scan import SCAN
from kumi.parallel.async_tp import PRODUCTS as OVERLAPPED_PRODUCTS
from kumi.parallel.async_tp import SCATTERED as OVERLAPPED_SUM
from kumi.parallel.expert_parallel import COUNTS as EXCHANGED_COUNTS
from kumi.parallel.expert_parallel import ROWS as EXCHANGED_ROWS
from kumi.parallel.ring_attention import OPERATOR as RING_ATTENTION
from kumi.parallel.tensor_parallel import LINEARS as GATHERED_LINEARS
from kumi.parallel.tensor_parallel import SUMMED_LINEAR
from kumi.parallel.token_collectives import SCATTER, SUM
from kumi.parallel.ulysses import OPERATOR as DEALT_HEADS

_aten = torch.ops.aten
KEPT = (
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    GROUPED_PRODUCTS,
    SCAN,
    PACKED_ATTENTION,
    FLASH_ATTENTION,
    BLOCK_ATTENTION,
    RING_ATTENTION,
    DEALT_HEADS,
    GATHERED_LINEARS,
    SUMMED_LINEAR,
    OVERLAPPED_PRODUCTS,
    OVERLAPPED_SUM,
    SCATTER,
    EXCHANGED_ROWS,
    EXCHANGED_COUNTS,
    SUM,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._flash_attention_forward.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
)
# To import what defines it takes longer than all else.
KEPT_BY_NAME = (VARLEN_ATTENTION,)


@dataclass
class Aside:
    """`on` is True while operations run that must not be replayed: they differ the second time."""

    on: bool = False


class Recompute:
    """A wrapper for `layer.around`: what it surrounds is run again in the backward pass.

    `how` is "selective" or "full". The hooks of FSDP on the layer run outside of it; where a part of the layer is
    sharded by itself, call `leave_out`.
    """

    def __init__(self, how: str) -> None:
        self.aside = Aside()
        # A decoder draws no random numbers.
        self.options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
        if how == "selective":
            self.options["context_fn"] = partial(_contexts, self.aside)

    def __call__(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return inner(*args, **kwargs)
        return checkpoint(inner, *args, **self.options, **kwargs)

    def leave_out(self, module: nn.Module) -> None:
        """Do not replay the hooks of `module`, a part of the layer: they gather and free its parameters."""
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key, hook in hooks.items():
                hooks[key] = partial(_run_aside, self.aside, hook)


def _run_aside(aside: Aside, hook: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    before, aside.on = aside.on, True
    try:
        return hook(*args, **kwargs)
    finally:
        aside.on = before


def _contexts(aside: Aside) -> tuple[Any, Any]:
    """PyTorch's two modes of selective recomputation, of the forward and of its repetition, blind to what is aside."""
    modes: tuple[Any, Any] = create_selective_checkpoint_contexts(_policy)  # type: ignore[no-untyped-call]
    for mode in modes:
        kind = type(mode)

        def dispatch(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None, kind: Any = kind) -> Any:
            if aside.on:
                return func(*args, **(kwargs or {}))
            return kind.__torch_dispatch__(self, func, types, args, kwargs)

        mode.__class__ = type(kind.__name__, (kind,), {"__torch_dispatch__": dispatch})
    return modes


def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = op in KEPT or op.name() in KEPT_BY_NAME
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
