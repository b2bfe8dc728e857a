"""The plan as another trainer's configuration, or in sentences why that trainer cannot carry it out.

    export(job, layout, "megatron-lm")       ->  {"megatron_lm.sh": text}
    unsupported(job, layout, "torchtitan")   ->  every reason why not; empty when it can

Each trainer is one module with two pure functions: `unsupported(job, layout)` and `files(job, layout, steps)`.
"""

from __future__ import annotations

from types import ModuleType

from kumi.errors import ConfigError, LayoutError
from kumi.export import accelerate_fsdp, deepspeed, megatron_bridge, megatron_lm, nanotron, torchtitan
from kumi.export.common import STEPS, deals_heads, unbalanced
from kumi.spec.job import Job
from kumi.spec.layout import Layout

TRAINERS: dict[str, ModuleType] = {
    "megatron-lm": megatron_lm,
    "megatron-bridge": megatron_bridge,
    "deepspeed": deepspeed,
    "accelerate-fsdp": accelerate_fsdp,
    "torchtitan": torchtitan,
    "nanotron": nanotron,
}


def unsupported(job: Job, layout: Layout, trainer: str) -> list[str]:
    """Every reason why `trainer` cannot carry out `layout`, with what it can do instead; empty when it can."""
    return [*unbalanced(job, layout), *deals_heads(layout), *_module(trainer).unsupported(job, layout)]


def export(job: Job, layout: Layout, trainer: str, steps: int = STEPS) -> dict[str, str]:
    """The files, name to text, that make `trainer` train `job` with `layout` for `steps` optimizer steps.

    Raises LayoutError with every reason where `trainer` cannot, ConfigError for a trainer that is not known.
    """
    reasons = unsupported(job, layout, trainer)
    if reasons:
        raise LayoutError(f"{trainer} cannot carry out this plan: {'; '.join(reasons)}")
    found: dict[str, str] = _module(trainer).files(job, layout, steps)
    return found


def _module(trainer: str) -> ModuleType:
    if trainer not in TRAINERS:
        raise ConfigError(f"trainer '{trainer}' is unknown; kumi exports to {', '.join(TRAINERS)}")
    return TRAINERS[trainer]
