"""Pin a layout in a run file: give its fields in [layout], so that the planner chooses none of them."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, TypeVar

from kumi.config.job_sections import LayoutSection
from kumi.config.schema import PlanConfig
from kumi.spec.layout import Layout

_Config = TypeVar("_Config", bound=PlanConfig)


def pin_layout(config: _Config, layout: Layout) -> _Config:
    """Return `config` with every field of `layout` pinned, so that reading it again gives the same layout."""
    return config.model_copy(update={"layout": LayoutSection.model_validate(layout_keys(layout))})


def layout_keys(layout: Layout) -> dict[str, Any]:
    """Return the fields of `layout` by their keys in the section [layout] of a run file."""
    return {name: value for name, value in asdict(layout).items() if value is not None and value != ()}
