"""Parts of the validation: training steps of several shapes, whose sizes fit the free memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch

from kumi.spec.lora import Lora
from kumi.validation.fitting_case import SHARE, StepCase, fitted, free_bytes, tiny
from kumi.validation.model_shapes import LLAMA_1B, LLAMA_8B, QWEN_30B_A3B
from kumi.validation.part import Row, Rows, Setting
from kumi.validation.timed_step import measured_row, validated_device


class _Variant(NamedTuple):
    """A way to run the steps of a part: `changes` of its case. `plain`: by the plain loop (`plain_llama`)."""

    what: str
    changes: dict[str, Any]
    plain: bool = False


# Variants to compare with each other are neighbours, so that little time passes between their measurements.
_LLAMA_VARIANTS = (
    _Variant("kumi", {}),
    _Variant("plain loop", {}, plain=True),
    _Variant("kumi, compiled", {"compile": True}),
    _Variant("plain loop, compiled", {"compile": True}, plain=True),
    _Variant("kumi, selective", {"recompute": "selective"}),
    _Variant("kumi, full", {"recompute": "full"}),
    _Variant("plain loop, full", {"recompute": "full"}, plain=True),
    _Variant("kumi, 8 documents a row", {"documents": 8}),
    _Variant("kumi, compiled, selective", {"compile": True, "recompute": "selective"}),
    _Variant("kumi, compiled, full", {"compile": True, "recompute": "full"}),
)


def rows_of_1b(setting: Setting) -> Rows:
    """Yield steps of Llama-3.2-1B's shape."""
    yield from _rows(StepCase(LLAMA_1B), _LLAMA_VARIANTS, setting)


def rows_of_8b(setting: Setting) -> Rows:
    """Yield steps with layers of Llama-3.1-8B: eight of them, or as many as fit."""
    yield from _rows(StepCase(LLAMA_8B, layers=8), _LLAMA_VARIANTS, setting)


def rows_of_experts(setting: Setting) -> Rows:
    """Yield steps with four layers of Qwen3-30B-A3B, or fewer."""
    variants = (
        _Variant("kumi", {}),
        _Variant("kumi, full", {"recompute": "full"}),
        _Variant("kumi, compiled, full", {"recompute": "full", "compile": True}),
    )
    yield from _rows(StepCase(QWEN_30B_A3B, layers=4), variants, setting)


def rows_of_adapters(setting: Setting) -> Rows:
    """Yield steps of adapters of all linear layers of Llama-3.1-8B, on weights in 16 bits and in four."""
    variants = [_Variant("LoRA", {"lora": Lora()})]
    if find_spec("bitsandbytes") is not None:
        variants.append(_Variant("QLoRA (nf4)", {"lora": Lora(quantize="nf4")}))
    yield from _rows(StepCase(LLAMA_8B, recompute="full"), variants, setting)
    if find_spec("bitsandbytes") is None:
        yield {"what": "QLoRA was not run: the package bitsandbytes is not installed"}


def _rows(case: StepCase, variants: Sequence[_Variant], setting: Setting) -> Iterator[Row]:
    """Yield a row for each variant, with the sizes at which the first fits: of kumi's, it needs the most memory."""
    device = validated_device(setting)
    sized = _sizes(case, variants, device, setting)
    failures: list[Exception] = []
    for variant in variants:
        if sized is None:
            yield {"what": f"{variant.what}: no size fits the free memory"}
            continue
        if setting.tiny and "compile" in variant.changes:
            yield {"what": f"{variant.what}: left to the part compile on a CPU, where compilers take a minute"}
            continue
        case = replace(sized, **variant.changes)
        try:
            yield measured_row(variant.what, case, device, setting.seconds, plain=variant.plain)
        except Exception as error:  # the other variants may work
            failures.append(error)
            yield {"what": f"{variant.what}: failed ({type(error).__name__})"}
    if failures:
        raise failures[0]


def _sizes(case: StepCase, variants: Sequence[_Variant], device: torch.device, setting: Setting) -> StepCase | None:
    """Return `case` with the sizes that fit with the changes of the first variant; None if none fit."""
    if setting.tiny:
        return tiny(case)
    first = fitted(replace(case, **variants[0].changes), SHARE * free_bytes(device))
    return None if first is None else replace(case, config=first.config, layers=first.layers, seq_len=first.seq_len)
