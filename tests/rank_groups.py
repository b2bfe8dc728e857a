"""The groups of ranks along every axis, and the coordinates of ranks in them."""

from __future__ import annotations

from kumi.spec.layout import AXES, Layout
from kumi.spec.process_groups import EXPERT_AXES, axis


def groups(layout: Layout, name: str) -> tuple[tuple[int, ...], ...]:
    """Return the groups of ranks that communicate along axis `name`, in ascending order of their first ranks."""
    along = axis(layout, name)
    return tuple(along.group(rank) for rank in range(layout.world_size) if along.index(rank) == 0)


def groups_by_coords(layout: Layout, name: str) -> tuple[tuple[int, ...], ...]:
    """Return the groups along `name`, one of `AXES`, from the ranks' coordinates alone.

    The ranks of a group are equal in all other coordinates.
    """
    members: dict[tuple[int, ...], tuple[int, ...]] = {}
    for rank in range(layout.world_size):
        others = tuple(index for other, index in layout.coords(rank).items() if other != name)
        members[others] = (*members.get(others, ()), rank)
    return tuple(members.values())


def coords(layout: Layout, rank: int) -> dict[str, int]:
    """Return the index of `rank` on every axis, of the dense and of the expert arrangement."""
    return {name: axis(layout, name).index(rank) for name in (*AXES, *EXPERT_AXES)}
