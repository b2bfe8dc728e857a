"""The modules that torch.compile leaves uncompiled, and the passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from kumi.nn.attention.grouped_query import Attention
from kumi.nn.moe import MoE


def exclude_from_compile(decoder: nn.Module) -> None:
    """Exclude the modules of `decoder` that would be recompiled for every batch.

    Routed experts: the number of tokens of each expert depends on the data, and routers count in the backward pass.
    Attention in blocks: the blocks depend on the documents.
    """
    compiler: Any = torch.compiler
    uncompiled = compiler.disable(_call)
    for module in decoder.modules():
        if isinstance(module, MoE) or (isinstance(module, Attention) and _is_chunked(module)):
            module.wrappers.append(uncompiled)


@contextmanager
def uncompiled(decoder: nn.Module) -> Iterator[None]:
    """A context in which the compiled layers of `decoder` run uncompiled, for generation.

    Its passes have caches and lengths that change, so each would be compiled again, and on a CPU some kernels for them
    are not valid C++.
    """
    # Without compiled layers, dynamo, whose import takes seconds, is not needed.
    if all(getattr(module, "_compiled_call_impl", None) is None for module in decoder.modules()):
        yield
        return
    compiler: Any = torch.compiler
    with compiler.set_stance("force_eager"):
        yield


def _is_chunked(attention: Attention) -> bool:
    return attention.sinks is not None or not attention.scores.fused


def _call(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return inner(*args, **kwargs)
