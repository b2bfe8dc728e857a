"""A run file with its layout decided."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, TypeVar

from kumi.config.schema import LayoutSection, PlanConfig
from kumi.spec.layout import Layout

Kind = TypeVar("Kind", bound=PlanConfig)


def pinned_to(config: Kind, layout: Layout) -> Kind:
    """Return `config` with every choice of `layout` pinned, so that the same layout is taken when it is read again."""
    return config.model_copy(update={"layout": LayoutSection.model_validate(spelled(layout))})


def spelled(layout: Layout) -> dict[str, Any]:
    """Return every choice of `layout` by its key in the [layout] section of a run file."""
    return {name: value for name, value in asdict(layout).items() if value is not None and value != ()}
