"""The parts of the validation, the most important first. To add one, write its function and add a line here.

Limits add up to more than the time for all: few parts need theirs. docs/gpu-report.md explains every part.
"""

from __future__ import annotations

from kumi.validation.part import Part

_HERE = "kumi.validation"

PARTS: tuple[Part, ...] = (
    Part(
        "device",
        f"{_HERE}.device_part:rows_of_device",
        40.0,
        "Versions, the GPU, its clocks, and the rates of large matrix products and copies.",
    ),
    Part(
        "numbers",
        f"{_HERE}.numbers_part:rows_of_numbers",
        60.0,
        "Losses and gradient norms of tiny models of every kind, beside those of the CPU in float32.",
    ),
    Part(
        "waits",
        f"{_HERE}.audit_part:rows_of_waits",
        40.0,
        "Operations of a step for which the host waits for the device. There should be none.",
    ),
    Part(
        "kernels",
        f"{_HERE}.kernels_part:rows_of_kernels",
        50.0,
        "The kernels of `precision.kernels` beside PyTorch's operations, and which of them runs use. The steps below "
        "use them, too.",
    ),
    Part(
        "profile",
        f"{_HERE}.audit_part:rows_of_profile",
        40.0,
        "Where the time of two steps goes: the share of it in which the device is busy, gaps, copies, the longest "
        "kernels.",
    ),
    Part(
        "1B steps",
        f"{_HERE}.steps_part:rows_of_1b",
        90.0,
        "Training steps of the shape of Llama-3.2-1B, beside a plain PyTorch loop of the same shape.",
    ),
    Part(
        "8B steps",
        f"{_HERE}.steps_part:rows_of_8b",
        90.0,
        "Training steps with the layers of Llama-3.1-8B, as many of them as fit, beside a plain PyTorch loop.",
    ),
    Part(
        "attention",
        f"{_HERE}.attention_part:rows_of_attention",
        60.0,
        "Kinds of attention with one and with eight documents a row: time, and distance from the exact result.",
    ),
    Part("compile", f"{_HERE}.kernels_part:rows_of_compiled", 70.0, "Compiled layers beside uncompiled ones."),
    Part("fp8", f"{_HERE}.kernels_part:rows_of_fp8", 90.0, "Matrix products in float8 beside those in bfloat16."),
    Part(
        "experts",
        f"{_HERE}.steps_part:rows_of_experts",
        60.0,
        "Training steps with layers of Qwen3-30B-A3B: routed experts.",
    ),
    Part(
        "adapters",
        f"{_HERE}.steps_part:rows_of_adapters",
        45.0,
        "Training steps of adapters on frozen weights, in 16 bits and in four (QLoRA).",
    ),
    Part(
        "saving",
        f"{_HERE}.failures_part:rows_of_saving",
        40.0,
        "Steps while a checkpoint is written: how long training waits for the copy, and whether steps become slower.",
    ),
    Part(
        "out of memory",
        f"{_HERE}.failures_part:rows_of_memory",
        30.0,
        "A step for which the memory does not suffice, on purpose: the message, and whether the next step works.",
    ),
    Part(
        "run",
        f"{_HERE}.failures_part:rows_of_run",
        60.0,
        "`kumi train` on a small text, stopped by SIGTERM and resumed.",
    ),
    Part(
        "several devices",
        f"{_HERE}.several_part:rows_of_several",
        90.0,
        "Layouts over all devices of the machine: losses beside those of one device, speed, and a rank that is killed.",
    ),
    Part(
        "device at the end",
        f"{_HERE}.device_part:rows_of_rates",
        30.0,
        "The rates again, and the clocks under load: a warm device may be slower.",
    ),
)
