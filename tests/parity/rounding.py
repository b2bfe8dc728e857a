"""The largest differences between two computations of the same result that float32's rounding explains.

A product over n terms, as float32 computes it, is the exact one of weights that are off by some sqrt(n) units of
rounding each (Higham and Mary, 2019, "A new approach to probabilistic rounding error analysis"; n at worst). What
weights that are off by one unit do to the result, float64 tells: it includes what norms over few numbers make of it,
or long recurrences. Two computations are off by that, each in its own way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch

from tiny_models import in_float64

UNIT = 2.0**-24
DRAWS = 8


def rounding(
    wide: torch.nn.Module, length: int, compute: Callable[[torch.nn.Module], Mapping[str, torch.Tensor]]
) -> dict[str, float]:
    """Return the largest explained difference between two float32 computations, for each tensor of `compute(wide)`.

    `wide`: the float64 model. `length`: of the rows.
    """
    generator = torch.Generator().manual_seed(0)
    weights = {key: weight.clone() for key, weight in wide.state_dict().items()}
    terms = max(length, *(max(weight.shape) for key, weight in weights.items() if "embed" not in key and weight.dim()))
    with in_float64():
        exact = compute(wide)
        moved = dict.fromkeys(exact, 0.0)
        for _ in range(DRAWS):
            signs = {
                key: torch.randint(0, 2, weight.shape, generator=generator) * 2 - 1 for key, weight in weights.items()
            }
            wide.load_state_dict({key: weight * (1 + UNIT * signs[key]) for key, weight in weights.items()})
            for key, value in compute(wide).items():
                moved[key] = max(moved[key], float((value - exact[key]).abs().max()))
        wide.load_state_dict(weights)
    return {key: 2 * math.sqrt(terms) * most for key, most in moved.items()}
