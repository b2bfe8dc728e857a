"""A run file with its layout decided."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, TypeVar

from kumi.config.schema import LayoutSection, PlanConfig
from kumi.spec.layout import Layout

Kind = TypeVar("Kind", bound=PlanConfig)


def pinned_to(config: Kind, layout: Layout) -> Kind:
    """`config` with every choice of `layout` pinned, so that the same layout is taken when it is read again."""
    fields: dict[str, Any] = asdict(layout)
    if not layout.stage_layers:
        del fields["stage_layers"]
    return config.model_copy(update={"layout": LayoutSection.model_validate(fields)})
