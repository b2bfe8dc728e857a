"""Parts of the validation: kernels, compiled layers and float8, each beside what it would replace."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from kumi.errors import KumiError
from kumi.nn.fastest_kernels import Sizes, measure_kernels
from kumi.parallel.float8 import require_float8
from kumi.spec.numerics import parse_numerics
from kumi.train.fastest_settings import SIZES, TINY, compare_setting
from kumi.train.measure_numerics import store_measurement
from kumi.validation.fitting_case import SHARE, StepCase, fitted, free_bytes, tiny
from kumi.validation.model_shapes import LLAMA_8B
from kumi.validation.part import Row, Rows, Setting, Skipped
from kumi.validation.timed_step import measured_row, validated_device

# Sizes of a trial on a CPU.
_TINY_SIZES = Sizes(64, 64, 256, 8, 2, 4, 16, 16, 16)
# The time for all kernels together, compilation included.
_KERNEL_SECONDS = 45.0


def rows_of_kernels(setting: Setting) -> Rows:
    """Yield the time of each implementation of an operation, and why one would not be used."""
    device = validated_device(setting)
    choice = measure_kernels(device, _TINY_SIZES if setting.tiny else None, _KERNEL_SECONDS)
    if not setting.tiny:  # for the runs on this machine
        store_measurement(torch.cuda.get_device_name(device), choice.numerics, choice.seconds)
    chosen = set(choice.numerics.kernels)
    for operation, timings in choice.seconds.items():
        for name, seconds in timings.items():
            used = (operation, name) in chosen or (name == "torch" and operation not in dict(chosen))
            yield {"operation": operation, "implementation": name, "ms": 1e3 * seconds, "used": used}
    yield from ({"operation": note} for note in choice.notes)


def rows_of_compiled(setting: Setting) -> Rows:
    """Yield steps of two layers of Llama-3.1-8B, uncompiled and compiled, and the breaks of the compiled graph."""
    yield from _compared((("uncompiled", {}), ("compiled", {"compile": True})), setting)
    from torch._dynamo.utils import counters

    breaks = {str(reason).splitlines()[0]: count for reason, count in counters["graph_break"].items()}
    yield {"what": f"breaks of the graph: {sum(breaks.values())}"}
    yield from ({"what": f"a break: {reason[:160]}"} for reason in breaks)
    yield from _compared_setting("compile", setting)


def rows_of_fp8(setting: Setting) -> Rows:
    """Yield steps of two layers of Llama-3.1-8B in bfloat16 and in float8, compiled. Raise Skipped without float8."""
    try:
        require_float8(validated_device(setting))
    except KumiError as error:  # the device has none, or a package is missing
        raise Skipped(str(error)) from None
    variants = (("bfloat16, compiled", {"compile": True}), ("float8, compiled", {"compile": True, "precision": "fp8"}))
    yield from _compared(variants, setting)
    yield from _compared_setting("float8", setting)


def _compared_setting(name: str, setting: Setting) -> Iterator[Row]:
    """Yield the times of a layer with and without the setting `name`, and why runs would not get it.

    On a GPU, store the choice for the runs of this machine.
    """
    record = compare_setting(name, setting.device, TINY if setting.tiny else SIZES)
    if not setting.tiny:
        store_measurement(torch.cuda.get_device_name(0), parse_numerics(record["numerics"]), record["seconds"])
    for what, seconds in record["seconds"].get(name, {}).items():
        yield {"what": f"a layer with {name} {what}", "step, ms": 1e3 * seconds}
    yield from ({"what": note} for note in record["notes"])


def _compared(variants: Sequence[tuple[str, dict[str, Any]]], setting: Setting) -> Iterator[Row]:
    device = validated_device(setting)
    case = StepCase(LLAMA_8B | {"vocab_size": 32768}, layers=2)
    sized = tiny(case) if setting.tiny else fitted(case, SHARE * free_bytes(device))
    if sized is None:
        raise Skipped("no size fits the free memory of the device")
    for name, changes in variants:
        yield measured_row(name, replace(sized, **changes), device, setting.seconds)
