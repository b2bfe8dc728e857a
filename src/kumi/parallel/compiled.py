"""What torch.compile leaves as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from kumi.nn.attention.grouped_query import Attention
from kumi.nn.moe import MoE


def leave_uncompiled(decoder: nn.Module) -> None:
    """Keep out of what torch.compile makes of `decoder` what would be compiled anew with every batch.

    How many rows an expert gets depends on the data, and routers count in the backward pass. Which blocks there are in
    attention that is computed block by block depends on the data, too.
    """
    compiler: Any = torch.compiler
    as_it_is = compiler.disable(_as_it_is)
    for part in decoder.modules():
        if isinstance(part, MoE) or (isinstance(part, Attention) and _in_blocks(part)):
            part.around.append(as_it_is)


def _in_blocks(part: Attention) -> bool:
    return part.sinks is not None or not part.scores.fused


def _as_it_is(inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return inner(*args, **kwargs)
