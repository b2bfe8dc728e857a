"""The head of a run on several nodes: a process beside the agent of node 0, to which the agents of all nodes connect.

It passes the data's description from node 0 to the others, lets all nodes start their ranks together, notices an agent
that ends or falls silent, and decides what all agents end with (`kumi.launch.verdict`). It trains nothing, imports no
torch, and needs only the standard library. Messages are those of `kumi.launch.head_messages`.

The head is forked before its parent has threads. It ends when all agents have the verdict and have left.
"""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

from kumi import __version__
from kumi.errors import OK, CommunicationError, ConfigError
from kumi.launch.failure_causes import PRIMARY
from kumi.launch.head_messages import (
    BEATS,
    HELLO_SECONDS,
    LINE_BYTES,
    decode,
    encode,
    is_proof,
    new_nonce,
    plain_address,
    proof,
    watch_connection,
)
from kumi.launch.signals import EXIT_CODES
from kumi.launch.standing import LOOPBACK, HeadAddress
from kumi.launch.verdict import Report, Verdict, decide, early_failure
from kumi.safe_output import visible

_ARRIVAL_SECONDS = 600.0  # all agents must have connected by then
_NOTE_SECONDS = 20.0  # after this, the head says for which nodes it waits
# An agent is lost after this long without a message while its ranks do not run: it may hold Python's lock for long, as
# while torch is imported. TCP's keepalive notices earlier that its machine is cut off.
_IDLE_SECONDS = 600.0
_REPORT_SECONDS = 10.0  # after the first failure, the other agents have this long to report theirs
_LEAVE_SECONDS = 5.0  # after the verdict, the agents have this long to leave
_LATE_SECONDS = 10.0  # and agents that had not connected have this long to do so, and to hear the verdict
_BACKLOG = 1024  # agents that connect at the same time
_BIND_SECONDS = 15.0  # the head of an earlier attempt may still have the port


def listen(address: HeadAddress, patience: float | None = None) -> socket.socket:
    """Return a listening socket at the port of `address`, for IPv4 and IPv6, on all interfaces.

    On a loopback address, listen there alone. Raise ConfigError if the port cannot be used, or is still in use after
    `patience` seconds, by default 15.
    """
    loopback = address.host in LOOPBACK
    family = socket.AF_INET6 if ":" in address.host or not loopback else socket.AF_INET
    until = time.monotonic() + (_BIND_SECONDS if patience is None else patience)
    while True:
        try:
            if loopback:
                return socket.create_server((address.host, address.port), family=family)
            if socket.has_dualstack_ipv6():
                return socket.create_server(("", address.port), family=family, dualstack_ipv6=True)
            return socket.create_server(("", address.port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE and time.monotonic() < until:
                time.sleep(0.2)
                continue
            raise ConfigError(
                f"node 0 cannot listen at port {address.port} of the head {address} ({error.strerror or error}): give "
                f"all nodes another port of node 0 (--head HOST:PORT, or KUMI_HEAD)"
            ) from error


def fork_head(listener: socket.socket, nodes: int, token: str, lost_after: float) -> int:
    """Fork a process that is the head of `nodes` agents at `listener`, and return its process id.

    An agent counts as lost after `lost_after` seconds of silence. The process ends by itself soon after its parent.
    Call this before the process has threads.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        _serve(listener, nodes, token, lost_after, parent)
    listener.close()
    return child


def _serve(listener: socket.socket, nodes: int, token: str, lost_after: float, parent: int) -> NoReturn:
    """Be the head in the forked process, and end the process."""
    code = 1
    try:
        for signum in EXIT_CODES:  # the agents decide what a signal ends
            signal.signal(signum, signal.SIG_IGN)
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        asyncio.run(Head(nodes, token, lost_after, parent).serve(listener))
        code = OK
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        with suppress(OSError):
            sys.stderr.flush()
        os._exit(code)


@dataclass
class _Agent:
    """A connected agent. `heard`: monotonic time of its last message. `trains`: True while its ranks run."""

    node: int
    writer: asyncio.StreamWriter
    heard: float
    trains: bool = False

    def send(self, message: Mapping[str, Any]) -> None:
        """Send `message` to the agent, unless its connection is closing."""
        if not self.writer.is_closing():
            self.writer.write(encode(dict(message)))


class Head:
    """The state of a head: which agents are connected, how far each is, and which nodes have ended and how."""

    def __init__(self, nodes: int, token: str, lost_after: float, parent: int) -> None:
        self._nodes, self._token, self._lost_after, self._parent = nodes, token, lost_after, parent
        self._generation = 0  # of the ranks (see kumi.launch.head_messages)
        self._agents: dict[int, _Agent] = {}
        self._seen: set[int] = set()  # nodes that have ever connected
        self._notes: set[str] = set()  # about nodes that were refused
        self._broadcast: dict[str, Any] | None = None
        self._ready: set[int] = set()
        self._started: set[int] = set()
        self._store: int | None = None  # port of the store of all ranks
        self._reports: dict[int, Report] = {}
        self._decide_at: float | None = None  # after a failure: when the verdict falls, although reports are missing
        self._verdict: Verdict | None = None

    async def serve(self, listener: socket.socket) -> None:
        """Serve the agents at `listener` until all have left."""
        server = await asyncio.start_server(self._serve_connection, sock=listener, limit=LINE_BYTES, backlog=_BACKLOG)
        began, noted, beat_at, decided = time.monotonic(), False, 0.0, 0.0
        while True:
            await asyncio.sleep(0.05 if self._decide_at is not None else 0.2)
            now = time.monotonic()
            if now >= beat_at:
                beat_at = now + self._lost_after / BEATS
                self._send_all({"type": "beat"})
            if not noted and now - began > _NOTE_SECONDS:
                noted = True
                self._note_absent()
            self._find_lost(now, began)
            if self._verdict is None and self._may_decide(now):
                self._verdict, decided = decide(self._reports.values()), now
                self._send_all(self._verdict_message(self._verdict))
            if self._verdict is not None and self._may_leave(now - decided):
                server.close()
                return

    def _may_decide(self, now: float) -> bool:
        return len(self._reports) == self._nodes or (self._decide_at is not None and now >= self._decide_at)

    def _may_leave(self, seconds: float) -> bool:
        """Return True if the head may end, `seconds` after the verdict."""
        if len(self._seen) < self._nodes:
            return seconds > _LATE_SECONDS
        return not self._agents or seconds > _LEAVE_SECONDS

    def _note_absent(self) -> None:
        """Say for which nodes the head waits."""
        absent = sorted(set(range(self._nodes)) - self._seen)
        if absent and self._verdict is None:
            with suppress(OSError):
                print(f"head       waits for {_name_nodes(absent)} of {self._nodes}", file=sys.stderr, flush=True)

    def _find_lost(self, now: float, began: float) -> None:
        """Report agents that never came or have been silent too long, and node 0's if it died before it connected."""
        for node, agent in list(self._agents.items()):
            limit = self._lost_after if agent.trains else _IDLE_SECONDS
            if now - agent.heard > limit and node not in self._reports:
                self._lose(
                    node,
                    agent.heard,
                    f"node {node} has been silent for {limit:g} s: it hangs or is cut off; see its output, and run the "
                    f"same command again to resume from the last checkpoint",
                )
        if os.getppid() != self._parent and 0 not in self._reports and 0 not in self._agents:
            self._lose(0, now, _died_message(0))
        absent = sorted(set(range(self._nodes)) - self._seen)
        if absent and now - began > _ARRIVAL_SECONDS and self._decide_at is None:
            self._lose(
                absent[0],
                now,
                f"{_name_nodes(absent)} of {self._nodes} did not connect within {_ARRIVAL_SECONDS:.0f} s; check that "
                f"`kumi train` runs there, and that the node reaches the head",
            )

    def _lose(self, node: int, at: float, message: str) -> None:
        kind = CommunicationError
        self._note_end(Report(node, kind.exit_code, PRIMARY, at, kind.__name__, message))

    async def _serve_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection, from the greeting to its end."""
        agent = None
        try:
            watch_connection(writer.get_extra_info("socket"), self._lost_after)
            agent = await asyncio.wait_for(self._greet(reader, writer), HELLO_SECONDS)
            while agent is not None and (line := await reader.readline()).endswith(b"\n"):
                agent.heard = time.monotonic()
                self._receive(agent, decode(line))
        except (OSError, TimeoutError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            pass  # a stranger, a broken connection, or an agent that breaks the protocol
        finally:
            if agent is not None:
                del self._agents[agent.node]
                if agent.node not in self._reports:
                    self._lose(agent.node, time.monotonic(), _died_message(agent.node))
            writer.close()

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> _Agent | None:
        """Return the agent at the other end if it belongs to the run; None if it was refused or only told a failure."""
        nonce = new_nonce()
        writer.write(encode({"kumi": __version__, "nonce": nonce}))
        hello = decode(await reader.readline())
        if "failed" in hello:
            writer.write(encode(self._note_early_failure(hello)))
            await writer.drain()
            return None
        node, nodes = hello["node"], hello["nodes"]
        refusal = self._refusal(node, nodes, is_proof(hello["proof"], self._token, nonce, node, nodes))
        if refusal is not None:
            self._note_refusal(node, refusal)
            writer.write(encode({"refused": refusal}))
            await writer.drain()
            return None
        writer.write(encode({"proof": proof(self._token, str(hello["nonce"]))}))
        agent = _Agent(node, writer, time.monotonic())
        self._agents[node] = agent
        self._seen.add(node)
        for message in (self._broadcast, None if self._verdict is None else self._verdict_message(self._verdict)):
            if message is not None:
                agent.send(message)
        if self._decide_at is not None and self._verdict is None:
            agent.send(self._with_generation({"type": "stop"}))
        return agent

    def _note_refusal(self, node: object, refusal: str) -> None:
        """Show once that a node that is still to come was refused, as the user may wait for it."""
        text = visible(f"head       refused node {node}: {refusal}")
        if type(node) is int and node < self._nodes and node not in self._seen and text not in self._notes:
            self._notes.add(text)
            with suppress(OSError):
                print(text, file=sys.stderr, flush=True)

    def _note_early_failure(self, message: dict[str, Any]) -> dict[str, Any]:
        """Note that a node has failed before its agent connected, if that node is still to come; return the answer."""
        report = early_failure(message, self._nodes, time.monotonic())
        if report is None or report.node == 0 or report.node in self._seen:
            return {"refused": "no such node is expected"}
        self._seen.add(report.node)
        self._note_end(report)
        return {"noted": True}

    def _refusal(self, node: object, nodes: object, proven: bool) -> str | None:
        """Return why the agent that calls itself `node` of `nodes` is refused; None if it is not."""
        if not proven:
            return "its run is another one, or its train.out is not the folder that node 0 has"
        if nodes != self._nodes:
            return f"node 0 was started with {self._nodes} nodes, and this one with {nodes}"
        if not isinstance(node, int) or not 0 <= node < self._nodes:
            return f"nodes are numbered from 0 to {self._nodes - 1}"
        if node in self._agents:
            return f"node {node} is connected already, from another process"
        return f"node {node} of this attempt has ended" if node in self._reports else None

    def _receive(self, agent: _Agent, message: dict[str, Any]) -> None:
        """Do what the `message` of `agent` is for (see kumi.launch.head_messages)."""
        kind = message["type"]
        if kind == "beat" or message["generation"] != self._generation:
            return
        if kind == "broadcast":
            self._broadcast = message
            self._send_all(message, but=agent)
        elif kind == "ready":
            self._ready.add(agent.node)
            self._store = message["store"] if agent.node == 0 else self._store
            if len(self._ready) == self._nodes:
                for other in self._agents.values():
                    address = self._address_of(other)
                    other.send(self._with_generation({"type": "start", "store": self._store, "address": address}))
        elif kind == "started":
            self._started.add(agent.node)
            agent.trains = True
            if len(self._started) == self._nodes:
                self._send_all(self._with_generation({"type": "go"}))
        elif kind == "returned":
            agent.trains = False
        elif kind == "ended":
            self._note_end(Report.from_json(message["report"], agent.node, time.monotonic()))

    def _address_of(self, agent: _Agent) -> str:
        """Return the address by which other nodes reach the node of `agent`."""
        if agent.node:
            return plain_address(agent.writer.get_extra_info("peername")[0])
        other = next((each for each in self._agents.values() if each.node), agent)
        return plain_address(other.writer.get_extra_info("sockname")[0])

    def _note_end(self, report: Report) -> None:
        """Note how a node ended. A failure, or a code other than 0 before all ranks began, ends the other nodes."""
        if report.node in self._reports or self._verdict is not None:
            return
        self._reports[report.node] = report
        early = report.code != OK and len(self._started) < self._nodes
        if (report.severity is not None or early) and self._decide_at is None:
            self._decide_at = time.monotonic() + _REPORT_SECONDS
            self._send_all(self._with_generation({"type": "stop"}))

    def _with_generation(self, message: dict[str, Any]) -> dict[str, Any]:
        return {**message, "generation": self._generation}

    def _verdict_message(self, verdict: Verdict) -> dict[str, Any]:
        return self._with_generation({"type": "verdict", "verdict": asdict(verdict)})

    def _send_all(self, message: Mapping[str, Any], but: _Agent | None = None) -> None:
        for agent in self._agents.values():
            if agent is not but:
                agent.send(message)


def _name_nodes(nodes: list[int]) -> str:
    return f"node{'s' * (len(nodes) > 1)} {', '.join(map(str, nodes))}"


def _died_message(node: int) -> str:
    return (
        f"the agent of node {node} ended without a word: it was killed, or its machine failed; run the same command "
        f"again to resume from the last checkpoint"
    )
