"""`kumi doctor --nodes` on three machines, as network namespaces on a virtual switch: cut and slow links are named."""

from __future__ import annotations

import shutil
import subprocess
from functools import partial
from types import SimpleNamespace

import pytest
from tests.doctor.nodes import examine_nodes

from kumi.doctor import speed_checks
from namespaces import enter_namespace, ip, switched_namespaces

ADDRESSES = ("10.67.0.1", "10.67.0.2", "10.67.0.3")


@pytest.fixture
def networks():
    """The names of three network namespaces with `ADDRESSES` at a switch."""
    with switched_namespaces(ADDRESSES) as names:
        yield names


def examine_networks(folder, names, wait=60.0):
    """Run the doctor on a node in each of the namespaces, with the interface that it finds itself."""
    inside = {number: partial(enter_namespace, name) for number, name in enumerate(names)}
    return examine_nodes(folder, len(names), broken=inside, head=ADDRESSES[0], interface="", wait=wait)


def test_a_sound_network_passes(networks, tmp_path):
    first, *others = examine_networks(tmp_path, networks)
    assert (first.code, *(each.code for each in others)) == (0, 0, 0), first.printed + first.errors
    assert first.finding("interface")["value"] == "net0 to 10.67.0.1"
    assert first.finding("open ports")["value"].startswith("3 pairs")
    assert first.finding("bandwidth")["value"].startswith("6 directions")


def test_two_nodes_that_do_not_reach_each_other(networks, tmp_path):
    """Both reach the head, so only their own connection fails."""
    ip("-n", networks[1], "route", "add", "blackhole", f"{ADDRESSES[2]}/32")
    first, *others = examine_networks(tmp_path, networks)
    assert (first.code, *(each.code for each in others)) == (2, 2, 2)
    finding = first.finding("open ports")
    assert finding["verdict"] == "fail"
    assert finding["nodes"] == [1, 2]
    assert first.finding("all-reduce")["value"] == "not measured, since open ports failed"


def test_a_node_that_the_head_does_not_reach(networks, tmp_path):
    ip("-n", networks[2], "route", "add", "blackhole", f"{ADDRESSES[0]}/32")
    first, second, third = examine_networks(tmp_path, networks, wait=5.0)
    assert (first.code, second.code, third.code) == (2, 2, 2)
    assert first.finding("nodes")["value"] == "node 2 did not come"
    assert first.finding("all-reduce")["verdict"] == "ok"  # of the two that came
    assert "node 2 cannot reach node 0 at 10.67.0.1" in third.finding("head")["value"]


def test_a_slow_link(networks, tmp_path):
    if shutil.which("tc") is None:
        pytest.skip("limiting a link needs tc, of iproute2")
    limit = ["tc", "qdisc", "add", "dev", "net0", "root", "tbf", "rate", "100mbit", "burst", "64kb", "latency", "50ms"]
    limited = subprocess.run(["ip", "netns", "exec", networks[2], *limit], capture_output=True, text=True)
    if limited.returncode:
        pytest.skip(f"this kernel limits no links: {limited.stderr.strip()}")
    first, *_ = examine_networks(tmp_path, networks)
    finding = first.finding("bandwidth")
    assert first.code == 2
    assert finding["verdict"] == "fail"
    assert 2 in finding["nodes"]
    assert finding["value"].startswith("node 2 (")


def test_nodes_stop_to_measure_speeds_together():
    """A device of another node failed, so that node measures no more; this one does not wait for it again."""
    topics = []

    def exchange(topic, own, seconds):
        topics.append(topic)
        return {0: own, 1: {"rates": {"GPU 0": 10e12}, "failed": True}}

    workers = SimpleNamespace(
        processes={0: None}, send=lambda *request: None, receive=lambda seconds: {0: {"rate": 1e12, "cpu_share": 1.0}}
    )
    here = SimpleNamespace(
        workers=workers, devices=SimpleNamespace(kind="cuda"), smi="", meeting=SimpleNamespace(exchange=exchange)
    )
    reading = speed_checks.device_speed(here)
    assert topics == ["speeds 0"]
    assert reading.value["rates"] == {"GPU 0": 1e12}
