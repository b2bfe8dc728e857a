"""The modules and the passes that run uncompiled in a model whose layers torch.compile compiles."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from kumi.accelerator import can
from kumi.nn.attention.flex import SMALLEST_HEAD, with_block_masks
from kumi.nn.attention.grouped_query import Attention
from kumi.nn.decoder import Decoder
from kumi.nn.moe import MoE
from kumi.parallel.mesh import Mesh


def prepare_to_compile(decoder: Decoder, mesh: Mesh) -> None:
    """Exclude the modules of `decoder` that would be recompiled for every batch, and make `decoder` prepare the masks
    of FlexAttention.

    MoE layers are excluded, because the number of tokens of each expert depends on the data, and routers add up these
    numbers in the backward pass. Attention in blocks (see `_in_blocks`) is excluded, because the blocks depend on the
    documents.
    """
    compiler: Any = torch.compiler
    wrapper = compiler.disable(_call)
    windows: set[int | None] = set()
    for module in decoder.modules():
        if isinstance(module, MoE) or (isinstance(module, Attention) and _in_blocks(module, mesh)):
            module.wrappers.append(wrapper)
        elif isinstance(module, Attention) and not module.scores.fused:
            windows.add(module.spec.sliding_window)
    if windows:
        decoder.make_attention = with_block_masks(decoder.make_attention, windows)


@contextmanager
def uncompiled(decoder: nn.Module) -> Iterator[None]:
    """A context in which the compiled layers of `decoder` run uncompiled, for generation.

    A generation's passes have caches and lengths that change, so each pass would be compiled again. On a CPU, some of
    the kernels compiled for them are not valid C++.
    """
    # Without compiled layers, dynamo, whose import takes seconds, is not needed.
    if all(getattr(module, "_compiled_call_impl", None) is None for module in decoder.modules()):
        yield
        return
    compiler: Any = torch.compiler
    with compiler.set_stance("force_eager"):
        yield


def _in_blocks(attention: Attention, mesh: Mesh) -> bool:
    """Return True if kumi's own code computes `attention`, in blocks of queries: with sinks, and with a softcap or
    ALiBi where FlexAttention does not support them."""
    if attention.sinks is not None or attention.scores.fused:
        return attention.sinks is not None
    return not _has_flex(mesh) or attention.scores.bf16_bias or attention.spec.head_dim < SMALLEST_HEAD


def _has_flex(mesh: Mesh) -> bool:
    """Return True if FlexAttention has kernels for this rank's rows: on a GPU with complete rows."""
    return can(mesh.device, "FlexAttention") and mesh.layout.cp == 1


def _call(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `inner`, as a wrapper of `kumi.nn.wrappers` that changes nothing."""
    return inner(*args, **kwargs)
