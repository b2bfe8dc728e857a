"""`kumi doctor --nodes` on sound and on broken nodes: each fault is named, with exit code 2 on all nodes."""

from __future__ import annotations

import os
import socket
import sys

import pytest
from tests.doctor.nodes import Ended, bind_read_only, examine_nodes, may_mount, mount_tmpfs, slow_children

from kumi.doctor import clock_checks, device_workers, disk_checks, meeting, software_checks
from kumi.launch import head

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the nodes are forked")

needs_mounts = pytest.mark.skipif(not may_mount(), reason="a file system of a node's own needs root and namespaces")


def check_failure(ended: list[Ended], name: str, node: int | None, words: str) -> None:
    """Assert that all nodes ended with code 2, and that node 0 shows the failure of `name` at `node`, and no other."""
    first = ended[0]
    assert [each.code for each in ended] == [2] * len(ended), [each.errors for each in ended]
    assert first.failed() == [name], first.printed
    finding = first.finding(name)
    assert words in finding["value"], finding
    assert finding["remedy"]
    if node is not None:
        assert finding["nodes"] == [node]
        assert f"node {node} (" in finding["value"]


def test_sound_nodes_pass(tmp_path):
    ended = examine_nodes(tmp_path, own_interpreters=True)
    assert [each.code for each in ended] == [0, 0], [each.errors for each in ended]
    first, second = ended
    assert first.result["verdict"] != "fail"
    assert set(first.result["nodes"]) == {"0", "1"}
    assert second.printed == ""  # node 0 shows the result
    verdicts = {line["name"]: line["verdict"] for line in first.result["findings"]}
    made = {"nodes", "clock", "shared folder", "open ports", "all-reduce", "bandwidth", "interface", "free disk"}
    assert {name: verdicts[name] for name in made} == dict.fromkeys(made, "ok")
    assert "right on 2 devices" in first.finding("all-reduce")["value"]
    assert not (tmp_path / "out").exists()  # the doctor removes what it writes


def test_a_clock_that_is_ahead(tmp_path):
    def ahead():
        clock_checks.now = lambda read=clock_checks.now: read() + 3.0

    check_failure(examine_nodes(tmp_path, broken={1: ahead}), "clock", 1, "3.0 s ahead of node 0")


def test_another_configuration(tmp_path):
    ended = examine_nodes(tmp_path, words={1: ["optim.lr=0.5"]})
    check_failure(ended, "configuration", 1, "another value of optim.lr on node 1")
    assert "0.5" not in ended[0].finding("configuration")["value"]


def test_another_version(tmp_path):
    def older():
        software_checks.__version__ = "0.0.9"

    ended = examine_nodes(tmp_path, broken={1: older})
    check_failure(ended, "kumi version", 1, "0.0.9; the others: ")
    assert ended[0].finding("all-reduce")["verdict"] == "skip"  # nodes of two versions exchange facts only


@needs_mounts
def test_a_run_folder_that_one_node_cannot_write(tmp_path):
    (tmp_path / "out").mkdir()
    ended = examine_nodes(tmp_path, broken={1: lambda: bind_read_only(tmp_path / "out")})
    check_failure(ended, "shared folder", 1, f"{tmp_path / 'out'} is not writable (Read-only file system)")
    assert list((tmp_path / "out").iterdir()) == []


@needs_mounts
def test_a_run_folder_that_is_not_shared(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_checks, "_VISIBLE_SECONDS", 2.0)
    (tmp_path / "out").mkdir()
    ended = examine_nodes(tmp_path, broken={1: lambda: mount_tmpfs(tmp_path / "out", "size=1m")})
    check_failure(ended, "shared folder", 1, "is not the folder of node 0")


@needs_mounts
def test_small_shared_memory(tmp_path):
    ended = examine_nodes(tmp_path, broken={1: lambda: mount_tmpfs("/dev/shm", "size=512k")})
    check_failure(ended, "shared memory", 1, "512 KiB")


def test_a_slow_core(tmp_path):
    def slow():
        send = device_workers.DeviceWorkers.send

        def slowly(workers, command, each=None):
            if command == "speed" and not started:
                started.append(True)
                slow_children(share=0.1)
            send(workers, command, each)

        started: list[bool] = []
        device_workers.DeviceWorkers.send = slowly

    ended = examine_nodes(tmp_path, broken={1: slow})
    assert [each.code for each in ended] == [2, 2], [each.errors for each in ended]
    finding = ended[0].finding("device speed")
    assert finding["verdict"] == "fail", finding
    assert 1 in finding["nodes"]
    assert "below the median" in finding["value"]


def test_a_wrong_interface(tmp_path):
    def wrong():
        os.environ["GLOO_SOCKET_IFNAME"] = "nope0"

    ended = examine_nodes(tmp_path, broken={1: wrong})
    check_failure(ended, "interface", 1, "GLOO_SOCKET_IFNAME=nope0 does not exist; this machine has ")
    assert ended[0].finding("all-reduce")["value"] == "not measured, since interface failed"


def test_a_head_that_a_node_cannot_reach(tmp_path):
    """The head of node 1 is a port where nobody listens."""
    ended = examine_nodes(tmp_path, words={1: ["--head", "127.0.0.1:1"]}, wait=3.0)
    assert [each.code for each in ended] == [2, 2]
    assert ended[0].finding("nodes")["value"] == "node 1 did not come"
    assert ended[0].finding("nodes")["nodes"] == [1]
    head = ended[1].finding("head")
    assert head["value"] == "node 1 cannot reach node 0 at 127.0.0.1:1 (Connection refused)"


def test_a_port_that_is_taken(tmp_path, monkeypatch):
    monkeypatch.setattr(head, "_BIND_SECONDS", 0.3)
    monkeypatch.setattr(meeting, "_GREETING_SECONDS", 1.0)
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        ended = examine_nodes(tmp_path, words={node: ["--head", f"127.0.0.1:{port}"] for node in (0, 1)}, wait=2.0)
    assert [each.code for each in ended] == [2, 2]
    assert f"node 0 cannot listen at port {port} of the head 127.0.0.1:{port}" in ended[0].finding("head")["value"]
    assert "answers, but not as kumi doctor" in ended[1].finding("head")["value"]


def test_variables_that_differ(tmp_path):
    """NCCL's algorithms must be the same everywhere. Values of variables that may be secrets are never shown."""

    def set_variables():
        os.environ["NCCL_ALGO"] = "Ring"
        os.environ["NCCL_SECRET_TOKEN"] = "hunter2"

    ended = examine_nodes(tmp_path, broken={1: set_variables})
    check_failure(ended, "network variables", None, "NCCL_ALGO: unset on node 0")
    assert "Ring on node 1" in ended[0].finding("network variables")["value"]
    assert not any("hunter2" in each.printed + each.errors for each in ended)


def test_a_node_that_dies_is_named(tmp_path):
    def die():
        disk_checks._write = lambda file, text: os._exit(9)

    ended = examine_nodes(tmp_path, broken={1: die})
    assert [each.code for each in ended] == [2, 9]
    assert "left or hung during 'the files of all nodes'" in ended[0].finding("nodes")["value"]
    assert ended[0].finding("nodes")["nodes"] == [1]


def test_nodes_that_disagree_on_their_number(tmp_path):
    ended = examine_nodes(tmp_path, words={1: ["cluster.nodes=3"]}, wait=5.0)
    assert [each.code for each in ended] == [2, 2]
    assert "node 1 expects 3 nodes, and node 0 2" in ended[0].finding("nodes")["value"]
    assert "doctor     refused: node 1 expects 3 nodes, and node 0 2\n" in ended[0].errors  # at once
    assert "refuses node 1: node 1 expects 3 nodes" in ended[1].finding("head")["value"]
