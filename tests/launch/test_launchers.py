"""Which launcher starts the ranks of a run."""

from types import SimpleNamespace

import pytest

from kumi.errors import LayoutError
from kumi.launch import launchers, local
from kumi.launch.launchers import LAUNCHERS, pick_launcher
from kumi.launch.standing import LaunchedRank


def run_on(nodes, devices=2, out=None):
    cluster = SimpleNamespace(nodes=nodes, devices_per_node=devices)
    return SimpleNamespace(cluster=cluster, layout=SimpleNamespace(world_size=nodes * devices), out=out)


def test_one_machine_is_that_of_the_process(tmp_path):
    assert pick_launcher(run_on(1), None) is LAUNCHERS["local"] is local
    assert local.start(run_on(1, devices=1, out=tmp_path), lambda code: code, (3,)) == 3


def test_several_machines_are_refused_unless_a_launcher_has_started_this_rank():
    with pytest.raises(LayoutError, match=r"cluster.nodes=2, but .* start `kumi train` on each of the 2 nodes \(`srun"):
        pick_launcher(run_on(2), None)
    assert pick_launcher(run_on(2), LaunchedRank(3, 4, 1)) is local


def test_a_launcher_is_a_line_in_the_table(monkeypatch):
    far = SimpleNamespace(name="far", max_nodes=None, start=lambda run, fn, args: 0)
    monkeypatch.setattr(launchers, "LAUNCHERS", {**LAUNCHERS, "far": far})
    assert pick_launcher(run_on(1), None) is local
    assert pick_launcher(run_on(2), None) is far
    assert pick_launcher(run_on(2), LaunchedRank(3, 4, 1)) is local
