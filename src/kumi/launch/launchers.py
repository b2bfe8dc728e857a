"""The table of launchers, which start the ranks of a run on machines, and the choice of one for a run.

To add a launcher for other machines (Slurm, Kubernetes, ...), write a module that has the attributes and the function
of `Launcher`, and add the module to the table. The launcher reads nodes, devices and run folder from the run and
executes `kumi train` with the same run file on each machine. Each `kumi train` reads its rank by `kumi.launch.standing`
and runs the same function.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from kumi.config import ResolvedRun
from kumi.errors import LayoutError
from kumi.launch import local
from kumi.launch.standing import LaunchedRank


class Launcher(Protocol):
    """Starts the ranks of a run. Each launcher is a module.

    `name`: its key in the table. `max_nodes`: most machines on which it can start ranks; None for any number.
    """

    @property
    def name(self) -> str: ...

    @property
    def max_nodes(self) -> int | None: ...

    def start(self, run: ResolvedRun, fn: Callable[..., int | None], args: tuple[Any, ...]) -> int:
        """Run `fn(*args)` on every rank of `run`, wait for all, and return the run's exit code (see kumi.errors).

        Raise the KumiError of the rank that failed first.
        """


LAUNCHERS: Mapping[str, Launcher] = {launcher.name: launcher for launcher in (local,)}


def pick_launcher(run: ResolvedRun, launched: LaunchedRank | None) -> Launcher:
    """Return the first launcher of the table that reaches all machines of `run`; `local` on a `launched` rank.

    Raise LayoutError if no launcher reaches all of them.
    """
    if launched is not None:
        return LAUNCHERS[local.name]
    nodes = run.cluster.nodes
    for launcher in LAUNCHERS.values():
        if launcher.max_nodes is None or launcher.max_nodes >= nodes:
            return launcher
    raise LayoutError(
        f"cluster.nodes={nodes}, but this process was started alone, for one machine; start `kumi train` on each of "
        f"the {nodes} nodes (`srun --ntasks-per-node=1 kumi train ...`, or with --node, --nodes and --head), or set "
        f"cluster.nodes=1"
    )
