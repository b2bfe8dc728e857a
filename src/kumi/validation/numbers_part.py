"""Part of the validation: steps of tiny models of every kind, beside those of the CPU in float32."""

from __future__ import annotations

from functools import cache

import torch

from kumi.parallel import RankInfo, build_mesh
from kumi.spec.layout import Layout
from kumi.validation.part import Rows, Setting
from kumi.validation.timed_step import validated_device
from kumi.validation.tiny_steps import MODELS, TinyCase, tiny_steps

# Allowed relative differences of (losses, gradient norms) in the first step, and in later ones. Sums are in another
# order, and in bfloat16 everything is rounded on the way: on a CPU the bfloat16 differences are at most (2e-5, 1.1e-3),
# and (5e-4, 3.6e-2) in later steps, since AdamW's first updates are as large for gradients that are only rounding as
# for others. A fault shows: steps that compute with the weights of the start, instead of those of the last update,
# differ by up to (3e-3, 0.8).
TOLERANCE = {"fp32": ((1e-4, 3e-4), (1e-4, 3e-4)), "bf16": ((2e-4, 5e-3), (2e-3, 9e-2))}

Steps = list[tuple[float, float]]


def rows_of_numbers(setting: Setting) -> Rows:
    """Yield the difference of losses and gradient norms for each model, precision, and number of documents a row."""
    device = validated_device(setting)
    torch.set_float32_matmul_precision("highest")
    for model in MODELS:
        for precision in TOLERANCE:
            for documents in (False, True):
                steps, expected = _steps_on(device, model, precision, documents), _cpu_steps(model, documents)
                loss, norm = differences(steps, expected)
                yield {
                    "model": model,
                    "precision": precision,
                    "documents a row": 3 if documents else 1,
                    "loss": steps[-1][0],
                    "difference of losses": loss,
                    "difference of norms": norm,
                    "difference of first norms": differences(steps[:1], expected[:1])[1],
                    "near": near(steps, expected, precision),
                }


def differences(steps: Steps, expected: Steps) -> tuple[float, float]:
    """Return the largest relative difference of losses, and of gradient norms; NaN where one is not a number."""
    pairs = [
        [abs(value - exact) / abs(exact) for value, exact in zip(step, expected_step, strict=True)]
        for step, expected_step in zip(steps, expected, strict=True)
    ]
    loss, norm = (torch.tensor(each).amax().item() for each in zip(*pairs, strict=True))
    return loss, norm


def near(steps: Steps, expected: Steps, precision: str) -> bool:
    """Return True if all losses and gradient norms differ by at most `TOLERANCE`."""
    first, later = TOLERANCE[precision]
    parts = ((steps[:1], expected[:1], first), (steps[1:], expected[1:], later))
    return all(
        difference <= allowed
        for compared_steps, expected_steps, limits in parts
        for difference, allowed in zip(differences(compared_steps, expected_steps), limits, strict=True)
    )


def _steps_on(device: torch.device, model: str, precision: str, documents: bool) -> Steps:
    case = TinyCase(Layout(), model, precision, documents=documents)
    return tiny_steps(case, build_mesh(case.layout, RankInfo(0, 1, 0, device)))


@cache
def _cpu_steps(model: str, documents: bool) -> Steps:
    return _steps_on(torch.device("cpu"), model, "fp32", documents)
