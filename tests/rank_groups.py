"""The groups of ranks of every axis, and the places of ranks in them, for tests of what has groups."""

from __future__ import annotations

from kumi.spec.layout import AXES, Layout
from kumi.spec.process_groups import EXPERT_AXES, axis


def groups(layout: Layout, name: str) -> tuple[tuple[int, ...], ...]:
    """The groups of ranks that communicate along axis `name`, in ascending order of their first ranks."""
    one = axis(layout, name)
    return tuple(one.group(rank) for rank in range(layout.world_size) if one.index(rank) == 0)


def groups_by_coords(layout: Layout, name: str) -> tuple[tuple[int, ...], ...]:
    """The groups along `name`, one of `AXES`, from the ranks' coordinates alone: all others are equal in a group."""
    found: dict[tuple[int, ...], tuple[int, ...]] = {}
    for rank in range(layout.world_size):
        others = tuple(index for other, index in layout.coords(rank).items() if other != name)
        found[others] = (*found.get(others, ()), rank)
    return tuple(found.values())


def coords(layout: Layout, rank: int) -> dict[str, int]:
    """Where `rank` stands on every axis of both arrangements."""
    return {name: axis(layout, name).index(rank) for name in (*AXES, *EXPERT_AXES)}
