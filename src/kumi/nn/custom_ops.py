"""Register functions as operators of PyTorch's dispatcher, so that each is one operator for selective recomputation,
FLOP counting and fake tensors.

`torch.library.custom_op` would do the same, but imports torch's compiler, which takes a second or more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def define_op(
    name: str,
    schema: str,
    function: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    key: str = "CompositeExplicitAutograd",
) -> Any:
    """Register `function` as the operator kumi::`name`, and return the operator.

    `fake` returns tensors of the shapes, dtypes and devices of the results.
    `key`: PyTorch's dispatch key, "CPU" for operators of the CPU; by default every device.
    """
    torch.library.define(f"kumi::{name}", schema)
    torch.library.impl(f"kumi::{name}", key, function)
    torch.library.register_fake(f"kumi::{name}", fake)
    return getattr(torch.ops.kumi, name).default
