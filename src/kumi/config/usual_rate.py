"""The learning rate of a run file that sets none: the usual rate of its objective, if pretrained weights are trained.

`Objective.usual_lr` is for runs that train all weights. Adapters, which begin at zero, take ten times as much.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kumi.objectives import OBJECTIVES

# The usual rate of adapters, relative to that of all weights.
_ADAPTERS = 10


def usual_rate(kind: str, init: str, *, adapters: bool) -> float | None:
    """Return the usual peak learning rate of the objective `kind`; None without one.

    `init`: the value of model.init. `adapters`: True if only adapters are trained.
    """
    rate = OBJECTIVES[kind].usual_lr
    if rate is None or init == "random":
        return None
    return float(f"{rate * _ADAPTERS:.3g}") if adapters else rate


def with_usual_rate(written: Any) -> Any:
    """Return the sections `written` of a run file with `optim.lr`, where it is missing and the objective has a usual
    rate. Sections that are not valid are returned unchanged: their validation reports the mistake."""
    if not isinstance(written, Mapping):
        return written
    objective, model, optim = (written.get(name, {}) for name in ("objective", "model", "optim"))
    if not all(isinstance(section, Mapping) for section in (objective, model, optim)) or "lr" in optim:
        return written
    kind = objective.get("kind", "lm")
    if not isinstance(kind, str) or kind not in OBJECTIVES:
        return written
    rate = usual_rate(kind, model.get("init", "pretrained"), adapters=written.get("lora") is not None)
    return written if rate is None else {**written, "optim": {**optim, "lr": rate}}


def usual_rates() -> str:
    """Return the objectives and their usual rates as a list in words."""
    return ", ".join(f"'{kind}' {each.usual_lr:g}" for kind, each in OBJECTIVES.items() if each.usual_lr is not None)
