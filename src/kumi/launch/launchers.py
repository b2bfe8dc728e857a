"""What brings the ranks of a run onto machines: a table of launchers, and the one place that picks from it.

A launcher for other machines (Slurm, Kubernetes, ...) is a module with the same names and a line in the table. It takes
nodes, devices and the run folder from the run, and has each machine run `kumi train` on the same run file, which finds
its rank by `kumi.launch.standing` and so comes to the same function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from kumi.config import ResolvedRun
from kumi.errors import LayoutError
from kumi.launch import local
from kumi.launch.standing import Standing


class Launcher(Protocol):
    """`name` is its key in the table, `most_nodes` on how many machines it starts ranks, None for any number."""

    @property
    def name(self) -> str: ...

    @property
    def most_nodes(self) -> int | None: ...

    def start(self, run: ResolvedRun, fn: Callable[..., int | None], args: tuple[Any, ...]) -> int:
        """Have every rank of `run` do `fn(*args)`, wait for all, and return the run's exit code (see kumi.errors).

        Raise the KumiError of the rank that failed first.
        """


LAUNCHERS: Mapping[str, Launcher] = {launcher.name: launcher for launcher in (local,)}


def pick(run: ResolvedRun, place: Standing | None) -> Launcher:
    """Return the first launcher of the table that reaches the machines of `run`; `local` for a rank that an outside
    launcher has started at `place`. Raise LayoutError where none does."""
    if place is not None:
        return LAUNCHERS[local.name]
    nodes = run.cluster.nodes
    for launcher in LAUNCHERS.values():
        if launcher.most_nodes is None or launcher.most_nodes >= nodes:
            return launcher
    raise LayoutError(
        f"cluster.nodes={nodes}: kumi starts the ranks of one machine only; start the {run.layout.world_size} ranks "
        f"with a launcher such as torchrun, or set cluster.nodes=1"
    )
