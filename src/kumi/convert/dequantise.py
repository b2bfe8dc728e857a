"""Weights that are stored in eight or four bits, with scales beside them: read as bfloat16, a few rows at a time.

fp8     a matrix of F8_E4M3 and `<name>_scale_inv`: the factor of each block of rows and columns (DeepSeek-V3's
        technical report, arXiv:2412.19437, section 3.3), or one for all of it (weight_block_size null)
mxfp4   `<name>_blocks`, two numbers of four bits in each byte, and `<name>_scales`, the exponent of each 32 of them
        (the OCP Microscaling Formats specification, version 1.0), as the experts of gpt-oss are published
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kumi.convert.entry import Entry, entry_of, read_bytes
from kumi.convert.safetensors_read import Span
from kumi.errors import ModelError
from kumi.spec.families import quantised
from kumi.storage.write import as_bytes

# What the sixteen numbers of four bits stand for: a sign, two bits of exponent, one of fraction.
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_GROUP = 32
_SCALES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F8_E8M0": torch.float8_e8m0fnu}


def entries(folder: Path, spans: Mapping[str, Span], found: Mapping[str, Any]) -> dict[str, Entry]:
    """The tensors that `spans` are, by name, those that are quantised, as `found` in config.json says, as what they
    stand for.

    ModelError for a way to quantise that is none of the above.
    """
    kind = found.get("quant_method")
    if kind == "fp8":
        return _fp8(folder, spans, found)
    if kind == "mxfp4":
        return _mxfp4(spans)
    readable = " and ".join(quantised.READABLE)
    raise ModelError(
        f"{folder}: the weights are quantised by {kind!r}, which kumi does not read; it reads {readable}: "
        f"name the model before that, or dequantise it first"
    )


def _fp8(folder: Path, spans: Mapping[str, Span], how: Mapping[str, Any]) -> dict[str, Entry]:
    """Return the tensors, of which those of 8 bits have a scale for each block, or for all of them.

    With a static `activation_scheme` files hold besides, for programs that compute in 8 bits, by what each matrix's
    input is divided; kumi computes in more.
    """
    block = _block(folder, how)
    small = {name: span for name, span in spans.items() if span.dtype == "F8_E4M3"}
    scales = {name: f"{name}_scale_inv" for name in small}
    static = how.get("activation_scheme") == "static"
    inputs = {f"{name.removesuffix('weight')}activation_scale" for name in small if static and name.endswith(".weight")}
    beside = {*small, *scales.values(), *inputs}
    found = {name: entry_of(span) for name, span in spans.items() if name not in beside}
    for name, span in small.items():
        scale = spans.get(scales[name])
        rows, columns = (*span.shape, 0, 0)[:2]
        wanted = () if block is None else (-(-rows // block[0]), -(-columns // block[1]))
        if scale is None or scale.dtype not in _SCALES or scale.shape != wanted or len(span.shape) != 2:
            have = "missing" if scale is None else f"{scale.dtype} {scale.shape}"
            raise ModelError(
                f"{folder}: {scales[name]!r} is {have}; {name!r} {span.shape} in blocks of {block} needs "
                f"numbers {wanted}"
            )
        found[name] = _decoded(span, span.shape, _fp8_rows(span, scale, block or [rows, columns]))
    return found


def _block(folder: Path, how: Mapping[str, Any]) -> list[int] | None:
    """Return how many rows and columns share a scale, None where all of a matrix do; ModelError for anything else."""
    block = how.get("weight_block_size")
    if isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block):
        return block
    if block is None and "weight_block_size" in how:
        return None
    raise ModelError(
        f"{folder}: fp8 weights with weight_block_size {block!r}; kumi reads those with a scale for each "
        f"block of rows and columns, as [128, 128], or null: one for each matrix"
    )


def _fp8_rows(span: Span, scale: Span, block: list[int]) -> Callable[[int, int], Tensor]:
    def rows(low: int, high: int) -> Tensor:
        values = _read(span, torch.float8_e4m3fn, low, high).float()
        first, last = low // block[0], -(-high // block[0])
        factors = _read(scale, _SCALES[scale.dtype], first, last).float().reshape(last - first, -1)
        inside_block = torch.arange(low, high) // block[0] - first
        wide = factors.repeat_interleave(block[1], dim=1)[:, : span.shape[1]]
        return values.mul_(wide[inside_block]).to(torch.bfloat16)

    return rows


def _mxfp4(spans: Mapping[str, Span]) -> dict[str, Entry]:
    ending = "_blocks"
    packed = [name.removesuffix(ending) for name in spans if name.endswith(ending)]
    beside = {f"{name}{more}" for name in packed for more in (ending, "_scales")}
    found = {name: entry_of(span) for name, span in spans.items() if name not in beside}
    for name in packed:
        blocks, scales = spans[name + ending], spans.get(f"{name}_scales")
        shape = blocks.shape
        fits = len(shape) == 4 and shape[3] == _GROUP // 2 and scales is not None and scales.shape == shape[:3]
        if scales is None or not fits or (blocks.dtype, scales.dtype) != ("U8", "U8"):
            have = "missing" if scales is None else f"{scales.dtype} {scales.shape}"
            raise ModelError(
                f"{blocks.file}: {blocks.name!r} {blocks.dtype} {shape} does not go with {name}_scales, which is {have}"
            )
        experts, rows, groups, _ = shape
        found[name] = _decoded(blocks, (experts, groups * _GROUP, rows), _mxfp4_rows(blocks, scales), name)
    return found


def _mxfp4_rows(blocks: Span, scales: Span) -> Callable[[int, int], Tensor]:
    """Experts [low, high) (X, columns, rows): stored the other way round, as the model multiplies with them."""
    numbers = torch.tensor([*_FP4, *(-number for number in _FP4)], dtype=torch.bfloat16)

    def rows(low: int, high: int) -> Tensor:
        packed = _read(blocks, torch.uint8, low, high)
        exponents = _read(scales, torch.uint8, low, high).to(torch.int32) - 127
        pairs = torch.stack((numbers[(packed & 15).int()], numbers[(packed >> 4).int()]), dim=-1)
        values = torch.ldexp(pairs.flatten(-2), exponents[..., None])
        return values.flatten(-2).transpose(1, 2)

    return rows


def _decoded(span: Span, shape: tuple[int, ...], rows: Callable[[int, int], Tensor], name: str | None = None) -> Entry:
    return Entry(span.file, name or span.name, shape, "bfloat16", span.offset, rows)


def _read(span: Span, dtype: torch.dtype, low: int, high: int) -> Tensor:
    """Rows [low, high) of a stored tensor."""
    out = torch.empty((high - low, *span.shape[1:]), dtype=dtype)
    read_bytes(span.file, as_bytes(out), span.offset + low * prod(span.shape[1:]) * dtype.itemsize)
    return out
