"""Export of a plan as another trainer's configuration, or the reasons why that trainer does not support it.

    export(job, layout, "megatron-lm")       ->  {"megatron_lm.sh": text}
    unsupported(job, layout, "torchtitan")   ->  all reasons; empty if the layout is supported

Each trainer is a module with two pure functions: `unsupported(job, layout)` and `files(job, layout, steps)`.
"""

from __future__ import annotations

from types import ModuleType

from kumi.errors import ConfigError, LayoutError
from kumi.export import accelerate_fsdp, deepspeed, megatron_bridge, megatron_lm, nanotron, torchtitan
from kumi.export.common import DEFAULT_STEPS, unsupported_by_every_export, unsupported_head, unsupported_sizes
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
    """Return all reasons why `trainer` does not support `layout`, each with a remedy; empty if `layout` is
    supported."""
    return [
        *unsupported_sizes(job, layout),
        *unsupported_by_every_export(layout),
        *unsupported_head(job),
        *_module(trainer).unsupported(job, layout),
    ]


def export(job: Job, layout: Layout, trainer: str, steps: int = DEFAULT_STEPS) -> dict[str, str]:
    """Return the files (name -> text) with which `trainer` trains `job` with `layout` for `steps` optimizer steps.

    Raise LayoutError with all reasons if `trainer` does not support the plan, ConfigError for an unknown trainer.
    """
    reasons = unsupported(job, layout, trainer)
    if reasons:
        raise LayoutError(f"{trainer} does not support this plan: {'; '.join(reasons)}")
    files: dict[str, str] = _module(trainer).files(job, layout, steps)
    return files


def _module(trainer: str) -> ModuleType:
    if trainer not in TRAINERS:
        raise ConfigError(f"trainer '{trainer}' is unknown; kumi exports to {', '.join(TRAINERS)}")
    return TRAINERS[trainer]
