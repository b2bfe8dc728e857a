"""`kumi train` on two nodes begins with the checks of the doctor, on the port at which the head listens afterwards."""

from __future__ import annotations

import os
import sys

import pytest
from tests.doctor.nodes import fork_workers, free_port, write_run

from forked import run_all_forked
from kumi.cli import main
from kumi.doctor import clock_checks, disk_checks, limit_checks
from kumi.train import run_folder

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the nodes are forked")


def train(folder, *words, broken=lambda: None, second=()):
    """Run `kumi train` on two nodes; `broken` is called on node 1 before, which has the further words `second`.

    Return how both ended.
    """
    file, port = write_run(folder, 2), free_port()

    def node(number):
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        os.chdir(folder)
        fork_workers()
        if number:
            broken()
        place = ["--node", str(number), "--nodes", "2", "--head", f"127.0.0.1:{port}"]
        given = [*words, *(second if number else ())]
        raise SystemExit(main(["train", str(file), *place, "data.workers=1", "export.enabled=false", *given]))

    return run_all_forked([lambda: node(0), lambda: node(1)], timeout=120.0)


def ahead():
    clock_checks.now = lambda read=clock_checks.now: read() + 60.0


def test_sound_nodes_train_after_the_checks(tmp_path):
    first, second = train(tmp_path)
    assert (first[0], second[0]) == (0, 0), first[2] + second[2]
    lines = first[1].splitlines()
    checked = next(number for number, line in enumerate(lines) if "checks of 2 nodes passed in" in line)
    assert checked < next(number for number, line in enumerate(lines) if line.startswith("step 1/2"))
    assert "checks of" not in second[1]


def test_a_failure_ends_all_nodes_before_anything_is_written(tmp_path):
    first, second = train(tmp_path, broken=ahead)
    assert (first[0], second[0]) == (2, 2), first[2] + second[2]
    for _, _, errors in (first, second):
        assert "ConfigError: doctor: clock: node 1" in errors
        assert "60.0 s ahead of node 0" in errors
        assert "train.doctor=false leaves them out" in errors
    assert not (tmp_path / "out").exists()


def test_the_checks_can_be_left_out(tmp_path):
    first, second = train(tmp_path, "train.doctor=false", broken=ahead)
    assert (first[0], second[0]) == (0, 0), first[2] + second[2]
    assert "checks of" not in first[1]


def test_one_machine_with_several_ranks_is_checked_quickly(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(limit_checks, "_OWN_FILES", 10**9)
    monkeypatch.chdir(tmp_path)
    file = write_run(tmp_path, 1)
    words = ["cluster.devices_per_node=2", "batch.tokens_per_step=64"]
    assert main(["train", str(file), *words]) == 2
    assert "ConfigError: doctor: open files: " in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("doctor", [True, False], ids=["with-checks", "without-checks"])
def test_a_run_file_that_a_node_cannot_read_ends_all_nodes(tmp_path, doctor):
    first, second = train(tmp_path, f"train.doctor={str(doctor).lower()}", second=["train.stepz=1"])
    assert (first[0], second[0]) == (2, 2), first[2] + second[2]
    assert "ConfigError: node 1: train.stepz: unknown key" in first[2]
    assert "ConfigError: train.stepz: unknown key" in second[2]


@pytest.mark.parametrize("here", [True, False], ids=["node-0-checks", "node-1-checks"])
def test_nodes_that_disagree_on_the_checks_end(tmp_path, here):
    words = {True: "train.doctor=true", False: "train.doctor=false"}
    first, second = train(tmp_path, words[here], second=[words[not here]])
    assert (first[0], second[0]) == (2, 2), first[2] + second[2]
    reason = (
        "it makes the checks of kumi doctor first, which train.doctor=false leaves out on this node"
        if here
        else "trains without these checks: train.doctor is false there, and true on node 1"
    )
    assert reason in first[2]
    assert reason in second[2]
    assert "ConfigError: node 1: " in first[2]


@pytest.mark.parametrize("doctor", [True, False], ids=["with-checks", "without-checks"])
def test_nodes_with_caches_of_their_own_are_refused(tmp_path, monkeypatch, doctor):
    """train.out is on a store: all ranks write one local folder, in the cache."""
    monkeypatch.setattr(run_folder, "_TOKEN_LATE_SECONDS", 1.0)
    monkeypatch.setattr(disk_checks, "_VISIBLE_SECONDS", 1.0)
    monkeypatch.setenv("KUMI_CACHE", str(tmp_path / "cache-0"))

    def other_cache():
        os.environ["KUMI_CACHE"] = str(tmp_path / "cache-1")

    words = (f"train.out=file://{tmp_path}/store/run", f"train.doctor={str(doctor).lower()}")
    first, second = train(tmp_path, *words, broken=other_cache)
    assert (first[0], second[0]) == (2, 2), first[2] + second[2]
    for _, _, errors in (first, second):
        assert "is not the folder of node 0" in errors
        assert "KUMI_CACHE" in errors
