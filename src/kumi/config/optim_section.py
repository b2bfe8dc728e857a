"""The optimizer of a run file, with warm-up and decay converted to steps."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

from kumi.config.job_sections import OptimSection
from kumi.errors import ConfigError
from kumi.spec.optim import Optim


def choose_optim(section: OptimSection, steps: int | None) -> Optim:
    """Return the optimizer of `section` in a run of `steps` updates.

    `steps` is None while they are not known, as in a plan without [train]; a warm-up or decay that the run file does
    not give in steps then has 0 steps. The decay of "wsd" defaults to a tenth of the run. Raise ConfigError if warm-up
    and decay together are longer than the run.
    """
    fields = section.model_dump(exclude={"warmup_steps", "warmup_ratio"})
    if section.decay_steps and section.schedule != "wsd":
        raise ConfigError(
            f"optim.decay_steps={section.decay_steps} has no effect with optim.schedule={section.schedule!r}; "
            f"remove it, or set optim.schedule='wsd'"
        )
    if steps is None:
        return Optim(**fields, warmup_steps=section.warmup_steps or 0)
    if section.schedule == "wsd" and section.decay_steps == 0:
        fields["decay_steps"] = max(1, steps // 10)
    optim = Optim(**fields)
    return replace(optim, warmup_steps=_warmup_steps(optim, section, steps))


def _warmup_steps(optim: Optim, section: OptimSection, steps: int) -> int:
    """Return the warm-up steps of a run of `steps`. Raise ConfigError if too few steps remain after the warm-up."""
    longest = _longest_warmup(optim, steps)
    if section.warmup_steps is not None:
        key, minimum, length = f"warmup_steps={section.warmup_steps}", section.warmup_steps, section.warmup_steps
    else:
        assert section.warmup_ratio is not None, "OptimSection sets warmup_steps or warmup_ratio"
        # Exact decimal arithmetic: 0.07 of 100 steps are 7; a binary product is slightly more and would round up to 8.
        exact = Fraction(str(section.warmup_ratio)) * steps
        # Round up as Hugging Face does, unless only the rounding leaves no step for the decay.
        key, minimum, length = f"warmup_ratio={section.warmup_ratio}", math.floor(exact), min(math.ceil(exact), longest)
    if minimum > longest and optim.schedule == "constant":
        raise ConfigError(
            f"optim.{key} is longer than the run of {steps} steps; shorten the warm-up, or raise train.steps or "
            f"train.epochs"
        )
    if minimum > longest:
        decay = f"the decay over {optim.decay_steps} steps" if optim.schedule == "wsd" else f"a {optim.schedule} decay"
        raise ConfigError(
            f"optim.{key} and {decay} do not fit into {steps} steps; shorten the warm-up or the decay, or raise "
            f"train.steps or train.epochs"
        )
    return length


def _longest_warmup(optim: Optim, steps: int) -> int:
    """Return the maximum of warm-up steps in a run of `steps`.

    A learning rate that decays needs at least one step after the warm-up; only a run of one step may lack it.
    """
    if optim.schedule == "constant":
        return steps
    return steps - optim.decay_steps if optim.schedule == "wsd" else max(1, steps - 1)
