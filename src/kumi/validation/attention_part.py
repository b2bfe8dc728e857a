"""Part of the validation: kinds of attention, forward and backward, with one and with eight documents a row."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from kumi.accelerator import is_gpu
from kumi.bench.clock import seconds_of
from kumi.nn.attention.attention_context import segments, visible
from kumi.nn.attention.grouped_query import attend
from kumi.validation.part import Rows, Setting, Value
from kumi.validation.timed_step import fresh, validated_device

_TOKENS, _TINY_TOKENS = 8192, 128
_HEADS, _KV_HEADS, _SIZE = 32, 8, 128
_TINY_HEADS, _TINY_KV_HEADS, _TINY_SIZE = 4, 2, 16
# Tokens of the rows on which results are compared with the exact ones.
_COMPARED = 1024
_BACKENDS = {
    "SDPA, cuDNN": SDPBackend.CUDNN_ATTENTION,
    "SDPA, flash": SDPBackend.FLASH_ATTENTION,
    "SDPA, memory-efficient": SDPBackend.EFFICIENT_ATTENTION,
    "SDPA, plain": SDPBackend.MATH,
}

# Returns attention (1, S, H, E) of queries over keys and values.
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def rows_of_attention(setting: Setting) -> Rows:
    """Yield the time of each kind, its FLOP/s, and the distance of its result and gradients from the exact ones."""
    device = validated_device(setting)
    tokens = _TINY_TOKENS if setting.tiny else _TOKENS
    for documents in (1, 8):
        for name, of_length in _kinds(device, documents):
            row: dict[str, Value] = {"kind": name, "documents": documents}
            with fresh(device):
                try:
                    distance = _distance(of_length, min(tokens, _COMPARED), documents, device, tiny=setting.tiny)
                    inputs = _inputs(tokens, device, torch.bfloat16, tiny=setting.tiny)
                    work = partial(_forward_backward, of_length(tokens), *inputs)
                    seconds = seconds_of(work, device, setting.seconds / 4)
                except (RuntimeError, ValueError, TypeError, ImportError) as error:
                    first = (str(error).splitlines() or [""])[0]
                    yield row | {"result": f"not available ({type(error).__name__}: {first[:160]})"}
                    continue
            flops = 3.5 * 2 * tokens**2 / documents * inputs[0].shape[2] * inputs[0].shape[3]
            yield row | {"ms": 1e3 * seconds, "TFLOP/s": flops / seconds / 1e12, "distance": distance}


def _kinds(device: torch.device, documents: int) -> Iterator[tuple[str, Callable[[int], Attend]]]:
    """Yield (name, function of a row's length that returns the attention)."""
    yield "kumi", partial(_kumi, device, documents)
    for name, backend in _BACKENDS.items():
        if is_gpu(device) or name in ("SDPA, flash", "SDPA, plain"):
            yield name, partial(_sdpa, device, documents, backend)
    if is_gpu(device) and documents > 1:  # each row's length is compiled anew, in some seconds
        yield "FlexAttention, compiled", partial(_flex, device, documents)


def _document_ids(length: int, documents: int, device: torch.device) -> Tensor:
    return (torch.arange(length, device=device) * documents // length)[None]


def _kumi(device: torch.device, documents: int, length: int) -> Attend:
    """Return the attention that a training step uses."""
    ids = _document_ids(length, documents, device)
    context = segments(ids, ids if documents > 1 else None)
    return lambda q, k, v: attend(context, q, k, v, None)


def _sdpa(device: torch.device, documents: int, backend: SDPBackend, length: int) -> Attend:
    """Return PyTorch's attention by one of its kernels; with several documents a mask separates them."""
    ids = _document_ids(length, documents, device)
    mask = None if documents == 1 else visible(ids, length, None, device)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        groups = q.shape[2] // k.shape[2]
        k, v = (x.repeat_interleave(groups, 2) for x in (k, v))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None).transpose(1, 2)

    return run


def _flex(device: torch.device, documents: int, length: int) -> Attend:
    """Return FlexAttention, compiled, with a mask of blocks."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    ids = _document_ids(length, documents, device)[0]

    def seen(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (ids[query] == ids[key])

    mask = create_block_mask(seen, None, None, length, length, device=str(device))
    compiled: Any = torch.compile(flex_attention)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = compiled(*(x.transpose(1, 2) for x in (q, k, v)), block_mask=mask, enable_gqa=True)
        return out.transpose(1, 2)

    return run


def _inputs(tokens: int, device: torch.device, dtype: torch.dtype, *, tiny: bool) -> list[Tensor]:
    """Return queries, keys, values, and a gradient of the result."""
    heads, kv_heads, size = (_TINY_HEADS, _TINY_KV_HEADS, _TINY_SIZE) if tiny else (_HEADS, _KV_HEADS, _SIZE)
    random = torch.Generator(device).manual_seed(0)
    shapes = [(1, tokens, count, size) for count in (heads, kv_heads, kv_heads, heads)]
    drawn = [torch.randn(shape, device=device, generator=random).to(dtype) for shape in shapes]
    return [*(x.requires_grad_() for x in drawn[:3]), drawn[3]]


def _forward_backward(run: Attend, q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> list[Tensor]:
    out = run(q, k, v)
    return [out, *torch.autograd.grad(out, (q, k, v), grad)]


def _distance(
    of_length: Callable[[int], Attend], tokens: int, documents: int, device: torch.device, *, tiny: bool
) -> float:
    """Return the largest distance of result and gradients from the exact ones, as a fraction of their length."""
    inputs = _inputs(tokens, device, torch.bfloat16, tiny=tiny)
    exact = [x.detach().float().requires_grad_(x.requires_grad) for x in inputs]
    torch.set_float32_matmul_precision("highest")
    expected = _forward_backward(_sdpa(device, documents, SDPBackend.MATH, tokens), *exact)
    results = _forward_backward(of_length(tokens), *inputs)
    return max(
        float((result.float() - wanted).norm() / wanted.norm())
        for result, wanted in zip(results, expected, strict=True)
    )
