"""Dequantize fp8 and mxfp4 weights to bfloat16 while reading, a few rows at a time.

fp8     a matrix in F8_E4M3, and `<name>_scale_inv`: a factor for each block of rows and columns (DeepSeek-V3's
        technical report, arXiv:2412.19437, section 3.3), or for the entire matrix (weight_block_size null)
mxfp4   `<name>_blocks`, two 4-bit numbers per byte, and `<name>_scales`, an exponent per 32 numbers (the OCP
        Microscaling Formats specification, version 1.0); the format of gpt-oss's experts
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kumi.convert.files.safetensors_read import Span
from kumi.convert.files.stored_tensor import Entry, entry_of, read_bytes
from kumi.errors import ModelError
from kumi.spec.families._shared.quantization import READABLE_METHODS
from kumi.storage.write import as_bytes

# Values of FP4 (E2M1) without the sign bit: two bits of exponent, one of mantissa.
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Numbers of mxfp4 that share an exponent.
_GROUP = 32
# Dtypes of fp8's scales.
_SCALES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F8_E8M0": torch.float8_e8m0fnu}


def dequantized_entries(folder: Path, spans: Mapping[str, Span], quantization: Mapping[str, Any]) -> dict[str, Entry]:
    """Return the tensors of `spans` by name, quantized ones dequantized as `quantization` (of config.json) describes.

    Raise ModelError for a method other than fp8 and mxfp4.
    """
    method = quantization.get("quant_method")
    if method == "fp8":
        return _fp8_entries(folder, spans, quantization)
    if method == "mxfp4":
        return _mxfp4_entries(spans)
    readable = " and ".join(READABLE_METHODS)
    raise ModelError(
        f"{folder}: the weights are quantized by {method!r}, and kumi reads {readable} only; "
        f"name the unquantized model, or dequantize this one first"
    )


def _fp8_entries(folder: Path, spans: Mapping[str, Span], quantization: Mapping[str, Any]) -> dict[str, Entry]:
    """Return the tensors; an F8_E4M3 matrix is dequantized with its scale per block, or with its one scale.

    With a static `activation_scheme`, files also hold a scale of each matrix's input, for inference in fp8. kumi
    computes in higher precision and skips these input scales.
    """
    block = _block(folder, quantization)
    matrices = {name: span for name, span in spans.items() if span.dtype == "F8_E4M3"}
    scales = {name: f"{name}_scale_inv" for name in matrices}
    static = quantization.get("activation_scheme") == "static"
    inputs = {
        f"{name.removesuffix('weight')}activation_scale" for name in matrices if static and name.endswith(".weight")
    }
    consumed = {*matrices, *scales.values(), *inputs}
    result = {name: entry_of(span) for name, span in spans.items() if name not in consumed}
    for name, span in matrices.items():
        scale = spans.get(scales[name])
        rows, columns = (*span.shape, 0, 0)[:2]
        expected = () if block is None else (-(-rows // block[0]), -(-columns // block[1]))
        if scale is None or scale.dtype not in _SCALES or scale.shape != expected or len(span.shape) != 2:
            actual = "missing" if scale is None else f"{scale.dtype} {scale.shape}"
            blocks = "" if block is None else f" in blocks of {block}"
            raise ModelError(
                f"{folder}: {scales[name]!r} is {actual}, but {name!r} {span.shape}{blocks} needs floating-point "
                f"scales of shape {expected}; fetch the model again"
            )
        result[name] = _dequantized_entry(span, span.shape, _fp8_rows(span, scale, block or [rows, columns]))
    return result


def _block(folder: Path, quantization: Mapping[str, Any]) -> list[int] | None:
    """Return the rows and columns that share a scale, None for one scale per matrix; raise ModelError otherwise."""
    block = quantization.get("weight_block_size")
    if isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block):
        return block
    if block is None and "weight_block_size" in quantization:
        return None
    raise ModelError(
        f"{folder}: fp8 weights have weight_block_size {block!r}, and kumi reads [rows, columns] such as "
        f"[128, 128], or null for one scale per matrix; dequantize the model first"
    )


def _fp8_rows(span: Span, scale: Span, block: list[int]) -> Callable[[int, int], Tensor]:
    """Return a function that dequantizes rows [low, high) of an fp8 matrix."""

    def rows(low: int, high: int) -> Tensor:
        values = _read(span, torch.float8_e4m3fn, low, high).float()
        first, last = low // block[0], -(-high // block[0])
        factors = _read(scale, _SCALES[scale.dtype], first, last).float().reshape(last - first, -1)
        block_of_row = torch.arange(low, high) // block[0] - first
        per_column = factors.repeat_interleave(block[1], dim=1)[:, : span.shape[1]]
        return values.mul_(per_column[block_of_row]).to(torch.bfloat16)

    return rows


def _mxfp4_entries(spans: Mapping[str, Span]) -> dict[str, Entry]:
    """Return the tensors; each pair of blocks and scales becomes one tensor (X, columns, rows) of X experts."""
    blocks_suffix = "_blocks"
    packed = [name.removesuffix(blocks_suffix) for name in spans if name.endswith(blocks_suffix)]
    consumed = {f"{name}{suffix}" for name in packed for suffix in (blocks_suffix, "_scales")}
    result = {name: entry_of(span) for name, span in spans.items() if name not in consumed}
    for name in packed:
        blocks, scales = spans[name + blocks_suffix], spans.get(f"{name}_scales")
        shape = blocks.shape
        fits = len(shape) == 4 and shape[3] == _GROUP // 2 and scales is not None and scales.shape == shape[:3]
        if scales is None or not fits or (blocks.dtype, scales.dtype) != ("U8", "U8"):
            actual = "missing" if scales is None else f"{scales.dtype} {scales.shape}"
            raise ModelError(
                f"{blocks.file}: {blocks.name!r} {blocks.dtype} {shape} does not fit {name}_scales, which is {actual}; "
                f"fetch the model again"
            )
        experts, rows, groups, _ = shape
        result[name] = _dequantized_entry(blocks, (experts, groups * _GROUP, rows), _mxfp4_rows(blocks, scales), name)
    return result


def _mxfp4_rows(blocks: Span, scales: Span) -> Callable[[int, int], Tensor]:
    """Return a function that dequantizes experts [low, high) to (X, columns, rows).

    Files store (X, rows, columns); the model multiplies with the transpose.
    """
    numbers = torch.tensor([*_FP4, *(-number for number in _FP4)], dtype=torch.bfloat16)

    def rows(low: int, high: int) -> Tensor:
        packed = _read(blocks, torch.uint8, low, high)
        exponents = _read(scales, torch.uint8, low, high).to(torch.int32) - 127
        pairs = torch.stack((numbers[(packed & 15).int()], numbers[(packed >> 4).int()]), dim=-1)
        values = torch.ldexp(pairs.flatten(-2), exponents[..., None])
        return values.flatten(-2).transpose(1, 2)

    return rows


def _dequantized_entry(
    span: Span, shape: tuple[int, ...], rows: Callable[[int, int], Tensor], name: str | None = None
) -> Entry:
    return Entry(span.file, name or span.name, shape, "bfloat16", span.offset, rows)


def _read(span: Span, dtype: torch.dtype, low: int, high: int) -> Tensor:
    """Read rows [low, high) of a stored tensor."""
    out = torch.empty((high - low, *span.shape[1:]), dtype=dtype)
    read_bytes(span.file, as_bytes(out), span.offset + low * prod(span.shape[1:]) * dtype.itemsize)
    return out
