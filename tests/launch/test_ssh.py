"""The SSH script with real SSH servers on three loopback addresses: places, secrets, restarts, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from launch_jobs import HOSTILE, in_container
from mini_slurm import MiniSlurm
from ssh_servers import HOSTS, ssh_servers

from kumi.errors import ConfigError
from kumi.launch import ssh
from kumi.launch.cluster_launchers import submit_job, write_launch_file

CANARY = "c4n4ry-of-a-secret"
# Stands for `kumi train --end-with-stdin`: ends with the code of this start, or with 143 when its input closes.
NODE = """
import json, os, sys
from pathlib import Path
folder = Path(sys.argv[1])
node = os.environ["KUMI_NODE"]
start = len(list(folder.glob(f"node-{node}-*.json")))
assert sys.argv[-1] == "--end-with-stdin"
seen = {"words": sys.argv[2:], "folder": os.getcwd(), "environment": dict(os.environ), "pid": os.getpid()}
(folder / f"node-{node}.part").write_text(json.dumps(seen))
(folder / f"node-{node}.part").rename(folder / f"node-{node}-{start}.json")
print("hello", flush=True)
code = (folder / "codes").read_text().splitlines()[start]
if code:
    sys.exit(int(code))
while os.read(0, 1):
    pass
(folder / f"saved-{node}").touch()
print("saved", flush=True)  # fails where nobody reads it any more
sys.exit(143)
"""


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """SSH servers on HOSTS; the options with which ssh reaches them."""
    with ssh_servers(tmp_path_factory.mktemp("sshd")) as options:
        yield options


@pytest.fixture
def submitted(servers, tmp_path):
    """Return a function that starts a job on HOSTS whose nodes end with `codes`, and returns its record."""
    (tmp_path / "node.py").write_text(NODE)

    def submit(codes, launch=None, **fields):
        (tmp_path / "codes").write_text("".join(f"{code}\n" for code in codes))
        section = {"hosts": HOSTS, "ssh": {"options": servers, "port": 12345}} | (launch or {})
        program = (sys.executable, str(tmp_path / "node.py"), str(tmp_path))
        usual = {"nodes": 3, "program": program, "folder": str(tmp_path), "files": str(tmp_path / "launch")}
        job = replace(in_container(section), **(usual | fields))
        ssh.check(job, submit=True)
        return submit_job(ssh, job, write_launch_file(ssh, job, Path(job.files), replace=True))

    return submit


def ended(record):
    """Wait until the script has ended; return its state and its output."""
    state = MiniSlurm.wait_for(lambda: state if (state := ssh.state(record)).word != "running" else None)
    return state, (record.folder / "launch.out").read_text()


def seen(folder, node, start=0):
    return json.loads((folder / f"node-{node}-{start}.json").read_text())


def wait_for_nodes(folder):
    MiniSlurm.wait_for(lambda: all((folder / f"node-{node}-0.json").exists() for node in range(3)))


def test_each_host_learns_its_place_and_reads_its_secrets(submitted, tmp_path):
    hostile = tmp_path.joinpath(*HOSTILE.values())
    hostile.mkdir(parents=True)
    secrets = hostile / "secrets $(touch pwned)'.env"
    secrets.write_text(f"HF_TOKEN={CANARY} $(touch pwned)\n")
    secrets.chmod(0o600)
    overrides = (*HOSTILE.values(), "c.d=\\n")
    launch = {"env_file": str(secrets), "setup": ["export FROM_SETUP='a b'"]}
    record = submitted([0], launch, folder=str(hostile), overrides=overrides, run_file="--x $(touch pwned).toml")
    state, output = ended(record)
    assert (state.word, state.detail) == ("completed", "exit code 0")
    assert sorted(line for line in output.splitlines() if "hello" in line) == [
        f"node {node}  hello" for node in range(3)
    ]
    for node in range(3):
        place = seen(tmp_path, node)["environment"]
        assert (place["KUMI_HEAD"], place["KUMI_NODES"], place["KUMI_NODE"]) == ("127.0.0.2:12345", "3", str(node))
        assert (place["HF_TOKEN"], place["FROM_SETUP"]) == (f"{CANARY} $(touch pwned)", "a b")
        assert seen(tmp_path, node)["words"] == ["train", "./--x $(touch pwned).toml", *overrides, "--end-with-stdin"]
        assert seen(tmp_path, node)["folder"] == str(hostile)
    assert list(tmp_path.rglob("pwned")) == []
    assert [file for file in record.folder.iterdir() if CANARY in file.read_text()] == []


@pytest.mark.parametrize(
    "host", ["$(touch pwned)", "a;touch pwned", "`touch pwned`", "a b", "it's", "a@-oProxyCommand=x"]
)
def test_a_name_of_a_host_is_only_a_name(submitted, tmp_path, host):
    state, output = ended(submitted([0], {"hosts": [host], "requeues": 0}, nodes=1))
    assert (state.word, state.detail) == ("ended", "exit code 7"), output
    assert "hello" not in output
    assert list(tmp_path.rglob("pwned")) == []


def test_secrets_that_others_may_read_or_no_variables_end_the_nodes(submitted, tmp_path):
    secrets = tmp_path / "secrets.env"
    for mode, text, words in (
        (0o644, f"HF_TOKEN={CANARY}\n", "has mode 644; chmod 600 it"),
        (0o600, f"HF TOKEN={CANARY}\n", "line 1 is not NAME=value"),
    ):
        secrets.write_text(text)
        secrets.chmod(mode)
        state, output = ended(submitted([0], {"env_file": str(secrets)}))
        assert (state.detail, output.count(words)) == ("exit code 2", 3), output
        assert CANARY not in output


def test_a_lost_node_starts_all_again_a_refusal_does_not(submitted, tmp_path):
    _, output = ended(submitted([7, 2, 0]))
    assert "kumi: exit code 7 after 0 restarts" in output
    assert "kumi: exit code 2 after 1 restarts" in output
    assert not (tmp_path / "node-0-2.json").exists()


def test_a_stopped_script_lets_its_hosts_save(submitted, tmp_path):
    record = submitted([""])
    wait_for_nodes(tmp_path)
    assert ssh.state(record).word == "running"
    assert "lets its hosts save and end" in ssh.stop(record, tmp_path, now=False)
    state, output = ended(record)
    assert (state.word, state.detail) == ("ended", "exit code 143")
    assert output.count("saved") == 3
    assert "nothing is stopped" in ssh.stop(record, tmp_path, now=False)


@pytest.mark.parametrize("end", ["killed script", "stop --now"])
def test_hosts_save_and_end_however_the_script_ends(submitted, tmp_path, end):
    record = submitted([""])
    wait_for_nodes(tmp_path)
    if end == "stop --now":
        assert "are killed" in ssh.stop(record, tmp_path, now=True)
    else:
        os.kill(int(record.id), signal.SIGKILL)
    MiniSlurm.wait_for(lambda: all((tmp_path / f"saved-{node}").exists() for node in range(3)))
    pids = [seen(tmp_path, node)["pid"] for node in range(3)]
    MiniSlurm.wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
    assert ssh.state(record).word == "unknown"


def test_one_killed_connection_ends_its_host(submitted, tmp_path):
    record = submitted([""], {"requeues": 0})
    wait_for_nodes(tmp_path)
    children = Path(f"/proc/{record.id}/task/{record.id}/children").read_text().split()
    clients = [pid for pid in children if Path(f"/proc/{pid}/comm").read_text() == "ssh\n"]
    assert len(clients) == 3
    os.kill(int(clients[1]), signal.SIGKILL)
    MiniSlurm.wait_for((tmp_path / "saved-1").exists)
    time.sleep(0.5)
    assert not (tmp_path / "saved-0").exists()  # kumi's own nodes hear of it from their head
    ssh.stop(record, tmp_path, now=False)
    ended(record)


@pytest.mark.parametrize(
    ("launch", "words"),
    [
        ({"hosts": ["a"]}, r"launch.hosts has 1 hosts, but cluster.nodes=4"),
        ({"hosts": ["a", "b", "c", "-oProxyCommand=x"]}, r"'-oProxyCommand=x' begins with a dash"),
        ({"ssh": {"options": ["-i 'x"]}}, r"launch.ssh.options: .* cannot be split into words"),
        ({"env": ["HF_TOKEN"]}, r"launch.env: ssh would show the values on its command line"),
    ],
)
def test_what_ssh_cannot_do_is_refused(launch, words):
    with pytest.raises(ConfigError, match=words):
        ssh.check(in_container(launch), submit=False)


def test_without_hosts_there_is_a_placeholder():
    assert "hosts=(REPLACE-WITH-HOSTS)   # one a node, as ssh names them: launch.hosts\n" in ssh.text(in_container({}))
