"""The optimizer that a run file describes, with its warm-up and decay counted in steps."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

from kumi.config.schema import OptimSection
from kumi.errors import ConfigError
from kumi.spec.optim import Optim


def choose_optim(section: OptimSection, steps: int | None) -> Optim:
    """Return the optimizer of `section` in a run of `steps` updates.

    Without `steps`, as in a plan that has no [train], warm-up and decay are as long as the section says in steps, else
    0. The decay of "wsd" defaults to a tenth of the run. Raise ConfigError where warm-up and decay do not fit into it.
    """
    fields = section.model_dump(exclude={"warmup_steps", "warmup_ratio"})
    if section.decay_steps and section.schedule != "wsd":
        raise ConfigError(
            f"optim.decay_steps={section.decay_steps} is for schedule='wsd', not {section.schedule!r}; "
            f"remove it, or set optim.schedule='wsd'"
        )
    if steps is None:
        return Optim(**fields, warmup_steps=section.warmup_steps or 0)
    if section.schedule == "wsd" and section.decay_steps == 0:
        fields["decay_steps"] = max(1, steps // 10)
    optim = Optim(**fields)
    return replace(optim, warmup_steps=_warmup_steps(optim, section, steps))


def _warmup_steps(optim: Optim, section: OptimSection, steps: int) -> int:
    """Steps that warm up in a run of `steps`. Raise ConfigError where they leave too few for the decay of `optim`."""
    room = _room(optim, steps)
    if section.warmup_steps is not None:
        key, least, length = f"warmup_steps={section.warmup_steps}", section.warmup_steps, section.warmup_steps
    else:
        assert section.warmup_ratio is not None, "its default applies where warmup_steps is left out"
        # The decimal number as it is written: 0.07 of 100 steps are 7, not a little more.
        exact = Fraction(str(section.warmup_ratio)) * steps
        # Rounded up as Hugging Face does, unless rounding alone would take the last step of the decay.
        key, least, length = f"warmup_ratio={section.warmup_ratio}", math.floor(exact), min(math.ceil(exact), room)
    if least > room:
        decay = f"the decay over {optim.decay_steps} steps" if optim.schedule == "wsd" else f"a {optim.schedule} decay"
        raise ConfigError(
            f"optim.{key} and {decay} do not fit into train.steps={steps}; shorten the warm-up or the decay, or train "
            f"longer"
        )
    return length


def _room(optim: Optim, steps: int) -> int:
    """Most steps of a run of `steps` that can warm up: a rate that falls needs one step for it, unless there is only
    one."""
    if optim.schedule == "constant":
        return steps
    return steps - optim.decay_steps if optim.schedule == "wsd" else max(1, steps - 1)
