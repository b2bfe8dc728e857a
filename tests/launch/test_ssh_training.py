"""`kumi launch ssh` trains on three hosts: as one machine does, without a trace of its secrets, and leaves no rank."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import time
from pathlib import Path

import pytest
from canaries import (
    CANARIES,
    canaries_in,
    check_used,
    command_lines,
    exports,
    files_with_canaries,
    services,
    write_secrets,
)
from mini_slurm import MiniSlurm, free_ports
from ssh_servers import HOSTS, ssh_servers
from tests.train.conftest import losses, run_file

from forked import run_forked
from kumi.cli import main
from namespaces import inside_namespace, ip, switched_namespaces, two_namespaces

pytestmark = pytest.mark.exhaustive

SOURCE = str(Path(__file__).parents[2] / "src")
LOST = 15.0  # seconds; the default of recover.lost


@pytest.fixture
def launched(small, tmp_path, monkeypatch):
    """Launch a run over SSH, `launched(options, *words, setup, launch, **changes)`, with the data of the small run.

    Everything of the hosts is in `tmp_path`: the folder for temporary files, the home of the user, and kumi.
    """
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "documents.jsonl").write_bytes((small.folder / "documents.jsonl").read_bytes())
    program = tmp_path / "bin" / "kumi"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m kumi "$@"\n')
    program.chmod(0o755)
    for name in ("tmp", "home"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.chdir(folder)
    usual = {
        "PATH": f"{program.parent}:{os.environ['PATH']}",
        "PYTHONPATH": SOURCE,
        "HOME": str(tmp_path / "home"),
        "TMPDIR": str(tmp_path / "tmp"),
        "KUMI_NUMERICS": "reference",
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "MARK": str(tmp_path),
    }
    records = []

    def launch(options, *words, setup=None, launch=None, hosts=HOSTS, **changes):
        (port,) = free_ports(1)
        run_file(
            folder,
            cluster={"nodes": len(hosts), "devices_per_node": 1},
            layout={"dp_shard": len(hosts)},
            batch__tokens_per_step=64 * len(hosts),
            launch={
                "kind": "ssh",
                "hosts": list(hosts),
                "setup": exports(usual | (setup or {})),
                "ssh": {"options": options, "port": port},
                **(launch or {}),
            },
            **changes,
        )
        assert main(["launch", "run.toml", *words, "--submit"]) == 0
        (file,) = folder.glob("launch/*/launch.json")
        records.append(int(json.loads(file.read_text())["id"]))
        return records[-1], file.parent / "launch.out"

    yield launch
    for pid in [*records, *marked(tmp_path)]:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def marked(folder):
    """The processes on the hosts: all that have the variable MARK of this test, which the setup exports."""
    mark = f"MARK={folder}".encode()
    pids = []
    for name in os.listdir("/proc"):
        try:
            if name.isdecimal() and mark in Path(f"/proc/{name}/environ").read_bytes().split(b"\0"):
                pids.append(int(name))
        except OSError:
            continue
    return pids


def train_here(folder):
    os.chdir(folder)
    words = ["cluster.nodes=1", "cluster.devices_per_node=3", "train.out=here"]
    raise SystemExit(main(["train", "run.toml", *words]))


def wait_for_end(output):
    """Wait for the last line of the script, and return its output."""
    MiniSlurm.wait_for(lambda: output.exists() and "kumi: exit code" in output.read_text(), 240)
    return output.read_text()


def wait_for_steps(output):
    """Wait until the run has trained three steps."""

    def has_steps():
        text = output.read_text() if output.exists() else ""
        assert "kumi: exit code" not in text, text
        return "step 3/" in text

    MiniSlurm.wait_for(has_steps, 240)


@pytest.fixture
def options(tmp_path):
    """The options with which ssh reaches HOSTS, whose servers write all that they can into logs."""
    folder = tmp_path / "sshd"
    folder.mkdir()
    with ssh_servers(folder, level="DEBUG3") as words:
        yield words


def test_three_hosts_train_as_one_machine(launched, options, tmp_path):
    _, output = launched(options)
    assert "kumi: exit code 0" in wait_for_end(output), output.read_text()
    code, _, errors = run_forked(train_here, tmp_path / "work")
    assert code == 0, errors
    assert losses(tmp_path / "work" / "run") == losses(tmp_path / "work" / "here")


def test_hosts_that_have_addresses_of_ipv6_only_train(launched, tmp_path):
    """Two network namespaces with an SSH server each; the script runs in the first."""
    addresses = ("fd66:5::1", "fd66:5::2")
    folder = tmp_path / "sshd"
    folder.mkdir()
    with two_namespaces(addresses) as names:
        # ssh begins in the first namespace for both servers.
        servers = [["ip", "netns", "exec", name] for name in names]
        with ssh_servers(folder, addresses, prefixes=servers, client=servers[0]) as options, inside_namespace(names[0]):
            _, output = launched(options, hosts=addresses)
            assert "kumi: exit code 0" in wait_for_end(output), output.read_text()
    assert sorted(losses(tmp_path / "work" / "run")) == [1, 2, 3, 4, 5, 6]


def connections(script):
    """The processes of ssh that the script started."""
    children = Path(f"/proc/{script}/task/{script}/children").read_text().split()
    return [int(pid) for pid in children if Path(f"/proc/{pid}/comm").read_text() == "ssh\n"]


KILLED = {
    "script": lambda script: os.kill(script, signal.SIGKILL),
    "script and connections": lambda script: os.killpg(script, signal.SIGKILL),
    "all connections": lambda script: [os.kill(pid, signal.SIGKILL) for pid in connections(script)],
    "one connection": lambda script: os.kill(connections(script)[1], signal.SIGKILL),
}


@pytest.mark.parametrize("kill", KILLED)
def test_no_rank_is_left_on_any_host_once_the_launching_side_is_killed(
    launched, options, tmp_path, kill, record_property
):
    script, output = launched(options, launch={"requeues": 0}, train__steps=1_000_000)
    wait_for_steps(output)
    assert len(connections(script)) == len(HOSTS)
    assert len(marked(tmp_path)) >= 2 * len(HOSTS)  # an agent and a rank on each
    killed = time.monotonic()
    KILLED[kill](script)
    MiniSlurm.wait_for(lambda: not marked(tmp_path), 60)
    seconds = time.monotonic() - killed
    record_property("seconds", seconds)
    print(f"no process is left {seconds:.2f} s after the end of {kill}")
    assert seconds < LOST
    steps = [int(folder.name[5:]) for folder in (tmp_path / "work" / "run" / "checkpoints").glob("step_*")]
    assert max(steps) == max(losses(tmp_path / "work" / "run"))  # the last step is saved, with all before it


def test_hosts_save_and_end_once_their_servers_miss_the_launching_machine(launched, tmp_path):
    """Three namespaces at a switch. The first, where the script runs, loses its cable: no connection is closed."""
    addresses = ("10.66.4.1", "10.66.4.2", "10.66.4.3")
    folder = tmp_path / "sshd"
    folder.mkdir()
    lines = ("ClientAliveInterval 2", "ClientAliveCountMax 3")
    with switched_namespaces(addresses) as names:
        client, *servers = [["ip", "netns", "exec", name] for name in names]
        hosts = addresses[1:]
        with (
            ssh_servers(folder, hosts, lines=lines, prefixes=servers, client=client) as options,
            inside_namespace(names[0]),
        ):
            _, output = launched(options, hosts=hosts, train__steps=1_000_000)
            wait_for_steps(output)
            ip("-n", names[0], "link", "set", "net0", "down")
            began = time.monotonic()
            MiniSlurm.wait_for(lambda: not marked(tmp_path), 120)
            print(f"no process is left {time.monotonic() - began:.2f} s after the launching machine was cut off")
    steps = [int(folder.name[5:]) for folder in (tmp_path / "work" / "run" / "checkpoints").glob("step_*")]
    assert max(steps) == max(losses(tmp_path / "work" / "run"))


def test_secrets_are_in_no_output_and_no_file_but_the_users(launched, options, small, tmp_path, capfd):
    secrets = tmp_path / "secrets.env"
    write_secrets(secrets)
    model = small.folder / "run" / "hf"
    with services(tmp_path, model) as used, command_lines() as lines:
        changes = {**used.keys, "train__out": "s3://runs/tiny", "train__doctor": True}
        launch = {"env_file": str(secrets)}
        # The model is on a hub that this process does not reach.
        _, output = launched(options, "--unchecked", setup=used.environment, launch=launch, **changes)
        text = wait_for_end(output)
        assert "kumi: exit code 0" in text, text
        for verb in ("status", "logs"):
            assert main([verb, "run.toml"]) == 0
        assert any(b"--end-with-stdin" in line for line in lines)
        assert any(b"secrets.env" in line for line in lines)  # by name only
    check_used(used, text)
    assert any("sshd" in str(log) and log.stat().st_size > 10_000 for log in tmp_path.rglob("*.log"))
    assert files_with_canaries(tmp_path) == {secrets: list(CANARIES)}
    assert secrets.stat().st_mode & 0o777 == 0o600
    shown = capfd.readouterr()
    assert [name for data in (*lines, shown.out.encode(), shown.err.encode()) for name in canaries_in(data)] == []
