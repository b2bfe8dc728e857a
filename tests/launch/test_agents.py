"""Agents of two nodes on this machine, two ranks each: they begin together, and however a part fails they end together.

Each agent is a forked process with a session of its own, so that what is left of it can be counted.
"""

import contextlib
import os
import signal
import socket
import sys
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist

from kumi.errors import CommunicationError, ConfigError, KumiError, LayoutError
from kumi.launch import agent, early_failure, head, signals
from kumi.launch.head_messages import decode, encode, proof
from kumi.launch.local import run_node_ranks
from kumi.launch.standing import HeadAddress, Standing
from kumi.parallel import init_distributed
from session_processes import living

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are ended as Linux has it")

DEADLINE = 60.0
LOST = 8.0  # seconds
TOKEN = "of the run"


# Programs of ranks


def meet(folder):
    dist.init_process_group("gloo")
    total = torch.tensor([dist.get_rank() + 1])
    dist.all_reduce(total)
    assert total == 10
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK", "GLOO_SOCKET_IFNAME")
    (folder / f"rank{dist.get_rank()}").write_text(" ".join(os.environ[name] for name in names))
    dist.destroy_process_group()
    return 0


def step_until_asked(folder, culprit=None, how=None):
    """Steps until the ranks agree that one of them was asked to stop. The rank `culprit` does `how` in its third."""
    init_distributed(timeout_s=4.0 if how is stop_here else 60.0)
    flag = signals.install()
    (folder / f"pid{dist.get_rank()}").write_text(str(os.getpid()))
    step = 0
    while True:
        step += 1
        if step == 3 and dist.get_rank() == culprit:
            how()
        asked = torch.tensor([flag.requested or 0])
        dist.all_reduce(asked, op=dist.ReduceOp.MAX)
        if asked:
            dist.destroy_process_group()
            return signals.exit_code(int(asked))
        time.sleep(0.02)


def never_stop(folder):
    (folder / f"pid{os.environ['RANK']}").write_text(str(os.getpid()))
    while True:
        time.sleep(0.02)


def give_back(folder, codes):
    return codes[int(os.environ["RANK"])]


def die_here():
    os.kill(os.getpid(), signal.SIGKILL)


def stop_here():
    os.kill(os.getpid(), signal.SIGSTOP)


def refuse():
    raise LayoutError("tp=6 does not divide 8")


def break_down():
    raise ZeroDivisionError("one by zero")


# Agents


def work(folder, fn, args, before, link):
    """What `kumi train` does on a node: prepare on node 0, then train."""
    link.start_thread()
    node = link.standing.node
    if before is not None:
        before(folder, node)
    if node == 0:
        link.broadcast("prepared")
    else:
        assert link.receive() == "prepared"
    link.wait_for_all()
    return run_node_ranks(fn, (folder, *args), nproc=2, log_dir=folder / "logs", link=link)


def run_agent(folder, node, port, fn, args, before=None, token=TOKEN, nodes=2, lost=LOST):
    """The agent of a node, as the command line runs it. The exit code."""
    fork = agent.fork_head

    def noted_fork(*words):
        pid = fork(*words)
        (folder / "head").write_text(str(pid))
        return pid

    agent.fork_head = noted_fork
    (folder / "port").write_text(str(port))
    standing = Standing(node, nodes, HeadAddress("127.0.0.1", port), None, "test")
    try:
        with signals.exit_on_signal():
            return agent.run_as_agent(standing, token, lost, partial(work, folder, fn, args, before))
    except KumiError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        return error.exit_code
    except KeyboardInterrupt:
        return 130


class Node:
    """A process with the agent of a node."""

    def __init__(self, folder, node, port, fn, *args, **options):
        self.output = folder / f"node{node}.txt"
        self.pid = os.fork()
        if self.pid:
            return
        code = 99
        try:
            os.setsid()
            for number in (1, 2):
                os.dup2(os.open(self.output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), number)
            sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115
            code = run_agent(folder, node, port, fn, args, **options)
        except SystemExit as end:
            code = end.code
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def code(self):
        """The exit code, once the agent has ended and left no process."""
        until(lambda: (ended := os.waitpid(self.pid, os.WNOHANG))[0] and self.__setattr__("status", ended[1]) is None)
        until(lambda: not living(self.pid))
        return os.waitstatus_to_exitcode(self.status)

    def text(self):
        return self.output.read_text()

    def kill(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)


def until(condition):
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@pytest.fixture
def start(tmp_path):
    """Start the agents of two nodes: `start(fn, *args, **options)` returns both."""
    nodes = []

    def begin(fn, *args, **options):
        port = free_port()
        for node in range(2):
            nodes.append(Node(tmp_path, node, port, fn, *args, **options))
        return nodes

    yield begin
    for node in nodes:
        node.kill()


def training(folder):
    """Wait until all four ranks train."""
    until(lambda: all((folder / f"pid{rank}").exists() for rank in range(4)))
    return [int((folder / f"pid{rank}").read_text() or 0) for rank in range(4)]


# Tests


def test_ranks_of_two_nodes_form_one_group(start, tmp_path):
    assert [node.code() for node in start(meet)] == [0, 0]
    assert {rank: (tmp_path / f"rank{rank}").read_text() for rank in range(4)} == {
        0: "0 4 0 0 lo",
        1: "1 4 1 0 lo",
        2: "2 4 0 1 lo",
        3: "3 4 1 1 lo",
    }
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == [f"rank_0000{rank}.log" for rank in range(4)]


@pytest.mark.parametrize(("codes", "agreed"), [((75, 75, 75, 75), 75), ((0, 0, 6, 6), 6)])
def test_all_agents_end_with_one_code(start, codes, agreed):
    assert [node.code() for node in start(give_back, codes)] == [agreed, agreed]


@pytest.mark.parametrize("signum", [signal.SIGUSR1, signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
@pytest.mark.parametrize("node", [0, 1])
def test_a_signal_to_one_agent_stops_all(start, tmp_path, signum, node):
    nodes = start(step_until_asked)
    training(tmp_path)
    os.kill(nodes[node].pid, signum)
    assert [node.code() for node in nodes] == [signals.exit_code(signum)] * 2


def test_a_second_signal_ends_all_at_once(start, tmp_path):
    nodes = start(never_stop)
    training(tmp_path)
    os.kill(nodes[1].pid, signal.SIGTERM)
    time.sleep(1.2)
    os.kill(nodes[1].pid, signal.SIGTERM)
    assert [node.code() for node in nodes] == [143, 143]


@pytest.mark.parametrize(
    ("how", "culprit", "code", "words"),
    [
        (die_here, 3, 7, "rank 3 was killed by signal 9 (SIGKILL)"),
        (die_here, 0, 7, "rank 0 was killed by signal 9 (SIGKILL)"),
        (refuse, 2, 2, "LayoutError: node 1: tp=6 does not divide 8"),
        (break_down, 1, 1, "rank 1 failed unexpectedly"),
        (stop_here, 2, 7, "CommunicationError: node 1: rank 2 (stopped by a signal) did not join a collective"),
    ],
)
def test_the_failure_of_one_rank_is_the_error_of_all_agents(start, how, culprit, code, words):
    nodes = start(step_until_asked, culprit, how)
    assert [node.code() for node in nodes] == [code, code], [node.text() for node in nodes]
    first, second = (node.text() for node in nodes)
    mine = [first, second][culprit // 2]
    assert words.replace("node 1: ", "") in mine
    assert words.partition(": node 1")[0] in first
    assert f"node {culprit // 2}: " in [second, first][culprit // 2]
    assert f"node {culprit // 2}: " not in mine


@pytest.mark.parametrize("node", [0, 1])
def test_a_killed_agent_ends_the_other(start, tmp_path, node):
    nodes = start(step_until_asked)
    training(tmp_path)
    os.kill(nodes[node].pid, signal.SIGKILL)
    assert nodes[node].code() == -signal.SIGKILL
    assert nodes[1 - node].code() == 7
    assert f"the agent of node {node} ended without a word" in nodes[1 - node].text()


def test_a_killed_head_ends_all(start, tmp_path):
    nodes = start(never_stop)
    training(tmp_path)
    os.kill(int((tmp_path / "head").read_text()), signal.SIGKILL)
    assert [node.code() for node in nodes] == [7, 7]
    for number, node in enumerate(nodes):
        assert f"node {number} lost its connection to the head at 127.0.0.1:" in node.text()


def test_a_silent_agent_is_lost(start, tmp_path):
    nodes = start(never_stop, lost=2.0)
    training(tmp_path)
    os.kill(nodes[1].pid, signal.SIGSTOP)
    assert nodes[0].code() == 7
    assert "node 1 has been silent for 2 s" in nodes[0].text()
    os.kill(nodes[1].pid, signal.SIGCONT)
    assert nodes[1].code() == 7


def fail_on_node_1(folder, node):
    if node == 1:
        raise ConfigError("model.source: no such folder")
    time.sleep(DEADLINE)


def leave_on_node_1(folder, node):
    if node == 1:
        os.kill(os.getpid(), signal.SIGUSR1)
    time.sleep(DEADLINE)


def test_an_error_before_training_ends_the_node_that_still_prepares(start):
    nodes = start(meet, before=fail_on_node_1)
    assert [node.code() for node in nodes] == [2, 2]
    assert "ConfigError: node 1: model.source: no such folder" in nodes[0].text()
    assert "ConfigError: model.source: no such folder" in nodes[1].text()


def test_a_stop_before_training_ends_the_node_that_still_prepares(start):
    nodes = start(meet, before=leave_on_node_1)
    assert [node.code() for node in nodes] == [75, 75]
    assert "SIGUSR1: stopped" in nodes[1].text()


def test_the_head_waits_for_data_longer_than_silence_is_allowed(start):
    nodes = start(meet, before=lambda folder, node: None if node else time.sleep(3.0), lost=1.0)
    assert [node.code() for node in nodes] == [0, 0]


def test_agents_of_another_run_or_count_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(agent, "_REFUSED_SECONDS", 0.5)
    port = free_port()
    first = Node(tmp_path, 0, port, give_back, (0,) * 4)
    strangers = [
        (Node(tmp_path, 1, port, meet, token="of another"), "its run is another one, or its train.out is not"),
        (Node(tmp_path, 3, port, meet, nodes=4), "node 0 was started with 2 nodes, and this one with 4"),
    ]
    try:
        for stranger, words in strangers:
            assert stranger.code() == 2
            assert words in stranger.text()
        second = Node(tmp_path, 1, port, give_back, (0,) * 4)
        assert [first.code(), second.code()] == [0, 0]
        lines = [line for line in first.text().splitlines() if line.startswith("head       refused node ")]
        assert len(lines) == 1, lines  # not of node 3, which is none of this run
        assert lines[0].startswith("head       refused node 1: its run is another one")
    finally:
        first.kill()


def connected(port, hello):
    """The refusal of an agent that says `hello` with the right token, or ""."""
    with socket.create_connection(("127.0.0.1", port), timeout=5) as connection, connection.makefile("rb") as lines:
        nonce = decode(lines.readline())["nonce"]
        hello = {**hello, "nonce": "n", "proof": proof(TOKEN, nonce, hello["node"], hello["nodes"])}
        connection.sendall(encode(hello))
        return decode(lines.readline()).get("refused", "")


def test_a_port_in_use_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(head, "_BIND_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen at port {port} of the head .*Address already in use"):
            head.listen(HeadAddress("127.0.0.1", port))


def test_another_program_at_the_heads_port_is_refused(monkeypatch):
    monkeypatch.setattr(agent, "_REFUSED_SECONDS", 0.0)
    child = None
    with socket.create_server(("127.0.0.1", 0)) as other:
        child = os.fork()
        if child == 0:
            while True:
                other.accept()[0].sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
        try:
            standing = Standing(1, 2, HeadAddress("127.0.0.1", other.getsockname()[1]), None, "test")
            with pytest.raises(ConfigError, match="another program answers there"):
                agent.run_as_agent(standing, TOKEN, LOST, lambda link: 0)
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def test_a_program_that_says_nothing_at_the_heads_port_is_refused(monkeypatch):
    monkeypatch.setattr(agent, "_REFUSED_SECONDS", 0.0)
    monkeypatch.setattr(agent, "HELLO_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        standing = Standing(1, 2, HeadAddress("127.0.0.1", silent.getsockname()[1]), None, "test")
        with pytest.raises(ConfigError, match="another program answers there, and says nothing"):
            agent.run_as_agent(standing, TOKEN, LOST, lambda link: 0)


def test_a_node_that_fails_before_it_connects_ends_the_node_that_waits_for_it(tmp_path):
    port = free_port()
    first = Node(tmp_path, 0, port, meet)
    try:
        standing = Standing(1, 2, HeadAddress("127.0.0.1", port), None, "test")
        with pytest.raises(ConfigError, match="no such key"), early_failure.telling_others_of_errors(standing):
            raise ConfigError("train.stepz: no such key")
        assert first.code() == 2
        assert "ConfigError: node 1: train.stepz: no such key" in first.text()
    finally:
        first.kill()


def test_a_node_0_that_fails_before_its_head_listens_ends_the_others(tmp_path):
    port = free_port()
    others = [Node(tmp_path, node, port, meet, nodes=3) for node in (1, 2)]
    try:
        early_failure.tell_others(Standing(0, 3, HeadAddress("127.0.0.1", port), None, "test"), ImportError("no torch"))
        assert [other.code() for other in others] == [1, 1]
        for other in others:
            assert "KumiError: node 0: ImportError: no torch" in other.text()
    finally:
        for other in others:
            other.kill()


def test_nodes_that_all_fail_tell_each_other(tmp_path):
    port = free_port()
    child = os.fork()
    if child == 0:
        early_failure.tell_others(Standing(1, 2, HeadAddress("127.0.0.1", port), None, "test"), ConfigError("one"))
        os._exit(0)
    early_failure.tell_others(Standing(0, 2, HeadAddress("127.0.0.1", port), None, "test"), ConfigError("zero"))
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("greeting", [b"SSH-2.0-OpenSSH_9.2\r\n", b""])
def test_another_program_at_the_heads_port_is_told_nothing_for_long(monkeypatch, greeting):
    monkeypatch.setattr(early_failure, "_HEAD_SECONDS", 0.3)
    monkeypatch.setattr(early_failure, "_TELL_SECONDS", 3600.0)
    began = time.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as other:
        child = os.fork()
        if child == 0:
            connection = other.accept()[0]
            connection.sendall(greeting)
            time.sleep(DEADLINE)
            os._exit(0)
        try:
            standing = Standing(1, 2, HeadAddress("127.0.0.1", other.getsockname()[1]), None, "test")
            early_failure.tell_others(standing, ConfigError("train.stepz: no such key"))
            assert time.monotonic() - began < DEADLINE
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def test_a_node_without_the_others_shows_its_error_soon(monkeypatch, capsys):
    monkeypatch.setattr(early_failure, "_TELL_SECONDS", 0.5)
    monkeypatch.setattr(early_failure, "_NOTE_SECONDS", 0.1)
    for node in (0, 1):
        standing = Standing(node, 2, HeadAddress("127.0.0.1", free_port()), None, "test")
        early_failure.tell_others(standing, ConfigError("train.stepz: no such key"))
        printed = capsys.readouterr().err
        assert printed.startswith(f"node {node}     failed, and tells ")
        assert "ConfigError: train.stepz: no such key" in printed


def test_no_head_is_an_error_in_the_end(monkeypatch):
    monkeypatch.setattr(agent, "_CONNECT_SECONDS", 0.5)
    standing = Standing(1, 2, HeadAddress("127.0.0.1", free_port()), None, "test")
    with pytest.raises(CommunicationError, match=r"node 1 cannot reach the head at 127.0.0.1:.*Connection refused"):
        agent.run_as_agent(standing, TOKEN, LOST, lambda link: 0)


def test_a_node_that_never_comes_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(head, "_ARRIVAL_SECONDS", 1.0)
    monkeypatch.setattr(head, "_NOTE_SECONDS", 0.2)
    monkeypatch.setattr(head, "_LATE_SECONDS", 0.5)
    node = Node(tmp_path, 0, free_port(), meet, nodes=3)
    assert node.code() == 7
    assert "head       waits for nodes 1, 2 of 3" in node.text()
    assert "nodes 1, 2 of 3 did not connect within 1 s" in node.text()


HOSTILE = [
    b"",
    b"\n",
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 20,
    b"[" * 100_000 + b"\n",
    b"x" * (2**20 + 100),
    b'{"node": 1, "nodes": 2, "nonce": "n", "proof": "' + b"0" * 64 + b'"}\n{"type": "ended", "generation": 0}\n',
    b'{"node": 1, "nodes": 2, "nonce": "n", "proof": null}\n',
    b'{"node": true, "nodes": [], "nonce": {}, "proof": "\\ud800"}\n',
    b'{"node": 1' + b"0" * 6000 + b', "nodes": 2, "nonce": "n", "proof": ""}\n',
    b"null\n",
    b'{"node": 1, "nodes": 2, "failed": {"code": 2, "kind": "ConfigError", "message": "of a stranger"}}\n',
    b'{"node": 0, "nodes": 2, "failed": {"code": 2, "kind": "ConfigError", "message": "of a stranger"}}\n',
    b'{"node": 1, "nodes": 2, "failed": {"code": true, "kind": [], "message": null}}\n',
    b'{"failed": 7}\n',
]


def test_strangers_at_the_heads_port_change_nothing(start, tmp_path):
    nodes = start(step_until_asked)
    training(tmp_path)
    listening = int((tmp_path / "port").read_text())
    with contextlib.ExitStack() as stack:
        for data in HOSTILE * 2:
            stranger = stack.enter_context(socket.create_connection(("127.0.0.1", listening), timeout=10))
            with contextlib.suppress(OSError):
                stranger.sendall(data)
        for _ in range(200):  # more than may be pending
            stack.enter_context(socket.create_connection(("127.0.0.1", listening), timeout=10))
        assert "is connected already" in connected(listening, {"node": 1, "nodes": 2})
        assert "numbered from 0 to 1" in connected(listening, {"node": 2, "nodes": 2})
        os.kill(nodes[0].pid, signal.SIGTERM)
        assert [node.code() for node in nodes] == [143, 143], nodes[0].text()
    assert "Traceback" not in nodes[0].text()
