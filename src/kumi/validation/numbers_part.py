"""Part of the validation: steps of tiny models of every kind, beside those of the CPU in float32."""

from __future__ import annotations

from functools import cache

import torch

from kumi.parallel import RankInfo, build_mesh
from kumi.spec.layout import Layout
from kumi.validation.part import Rows, Setting
from kumi.validation.timed_step import validated_device
from kumi.validation.tiny_steps import MODELS, TinyCase, tiny_steps

# Relative differences of losses; sums are in another order, and in bfloat16 everything is rounded on the way. Norms may
# differ by three times as much.
TOLERANCE = {"fp32": 1e-4, "bf16": 3e-2}

Steps = list[tuple[float, float]]


def rows_of_numbers(setting: Setting) -> Rows:
    """Yield the difference of losses and gradient norms for each model, precision, and number of documents a row."""
    device = validated_device(setting)
    torch.set_float32_matmul_precision("highest")
    for model in MODELS:
        for precision in TOLERANCE:
            for documents in (False, True):
                steps = _on(device, model, precision, documents)
                loss, norm = differences(steps, _on_cpu(model, documents))
                allowed = TOLERANCE[precision]
                yield {
                    "model": model,
                    "precision": precision,
                    "documents a row": 3 if documents else 1,
                    "loss": steps[-1][0],
                    "difference of losses": loss,
                    "difference of norms": norm,
                    "near": loss <= allowed and norm <= 3 * allowed,
                }


def differences(steps: Steps, expected: Steps) -> tuple[float, float]:
    """Return the largest relative difference of losses, and of gradient norms; NaN where one is not a number."""
    pairs = [
        [abs(one - other) / abs(other) for one, other in zip(step, wanted, strict=True)]
        for step, wanted in zip(steps, expected, strict=True)
    ]
    loss, norm = (torch.tensor(each).amax().item() for each in zip(*pairs, strict=True))
    return loss, norm


def _on(device: torch.device, model: str, precision: str, documents: bool) -> Steps:
    case = TinyCase(Layout(), model, precision, documents=documents)
    return tiny_steps(case, build_mesh(case.layout, RankInfo(0, 1, 0, device)))


@cache
def _on_cpu(model: str, documents: bool) -> Steps:
    return _on(torch.device("cpu"), model, "fp32", documents)
