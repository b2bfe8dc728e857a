"""Newer versions of flash attention, if the user has installed one. PyTorch's own is version 2.

PyTorch lets FA3 (Hopper) and FA4 (Hopper and Blackwell) take the place of its flash kernels, so whole rows, packed
documents, rings and sinks all use them. Before a version is used, its results on this GPU are compared with those
of PyTorch's kernels, for the head sizes and windows of the model. If it fails or differs, PyTorch's kernels stay.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor

from kumi.accelerator import can
from kumi.compat import activate_flash, flash_backward, flash_forward, restore_flash
from kumi.spec.model import Attention, LatentAttention, ModelSpec

# Largest difference of results from PyTorch's kernels, relative to the largest element: some roundings of bfloat16.
_TOLERANCE = 2**-5
# Tokens of the comparison, and the boundaries of its two documents.
_TOKENS, _BOUNDS = 256, (0, 100, 256)


class _Version(NamedTuple):
    name: str
    module: str
    capability: str  # of `kumi.accelerator`


# In order of preference.
_VERSIONS = (
    _Version("FA3", "flash_attn_interface", "flash attention 3"),
    _Version("FA4", "flash_attn.cute.interface", "flash attention 4"),
)


class AttentionCase(NamedTuple):
    """A kind of attention in a model. `size`: of heads. `window`: of latest keys that a query sees, or None."""

    size: int
    window: int | None


def use_newer_flash(spec: ModelSpec, device: torch.device) -> str:
    """Let an installed newer version compute flash attention on `device`. Return a sentence about it; "" if
    none is installed, or if flash attention computes no layer of `spec`."""
    version = installed_version(device)
    cases = list(attention_cases(spec))
    if version is None or not cases:
        return ""
    plain = [_results(case, device) for case in cases]
    try:
        activate_flash(version)
        newer = [_results(case, device) for case in cases]
    except Exception as error:  # a package of another version, a head size that it refuses
        restore_flash()
        return f"{version} is not used, because it fails here ({str(error).partition(chr(10))[0]})"
    for case, expected, results in zip(cases, plain, newer, strict=True):
        differences = [_difference(*pair) for pair in zip(expected, results, strict=True)]
        if not all(difference <= _TOLERANCE for difference in differences):  # NaN is not near, either
            restore_flash()
            shown = ", ".join(f"{difference:.3g}" for difference in differences)
            return (
                f"{version} is not used, because its results for heads of {case.size} differ from PyTorch's by {shown} "
                f"of the largest element"
            )
    return f"{version} computes attention"


def installed_version(device: torch.device) -> str | None:
    """Return the newest installed version for `device`; None if there is none."""
    fitting = (version for version in _VERSIONS if can(device, version.capability))
    return next((version.name for version in fitting if _is_installed(version.module)), None)


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ImportError:  # the package around it is missing, or fails itself
        return False


def attention_cases(spec: ModelSpec) -> Iterator[AttentionCase]:
    """Yield the kinds of attention in `spec` that flash kernels compute, each once."""
    seen = set()
    for layer in spec.layers:
        attention = layer.attention
        if isinstance(attention, Attention) and attention.softcap is None and not attention.alibi:
            seen.add(AttentionCase(attention.head_dim, attention.sliding_window))
        if isinstance(attention, LatentAttention):
            seen.add(AttentionCase(attention.qk_head_dim, None))
    yield from sorted((case for case in seen if case.size % 8 == 0 and case.size <= 256), key=str)


def _results(case: AttentionCase, device: torch.device) -> list[Tensor]:
    """Return result, log-sum-exp and gradients of attention over two documents, with two query heads per key head."""
    random = torch.Generator(device).manual_seed(0)
    q, k, v, grad = (
        torch.randn(_TOKENS, heads, case.size, device=device, dtype=torch.bfloat16, generator=random)
        for heads in (2, 1, 1, 2)
    )
    window = None if case.window is None else min(case.window, _TOKENS // 4)
    bounds = torch.tensor(_BOUNDS, dtype=torch.int32, device=device)
    out, lse = flash_forward(q, k, v, bounds, _TOKENS, _TOKENS, causal=True, window=window)
    grads = flash_backward(grad, q, k, v, out, lse, bounds, _TOKENS, _TOKENS, causal=True, window=window)
    return [out, lse, *grads]


def _difference(expected: Tensor, result: Tensor) -> float:
    """Return the largest difference relative to the largest element; infinity if the shapes differ."""
    if expected.shape != result.shape:
        return float("inf")
    return float((result.float() - expected.float()).abs().max() / expected.float().abs().max())
