"""The agent of one node in a run on several nodes: it starts the ranks of its node and ends with all other agents.

    node 0                                   node 1
    kumi train -- head (a process)           kumi train
        |           ^------ one TCP connection ---|
    rank 0, rank 1                           rank 2, rank 3     one process group, through a TCPStore at node 0

The head (`kumi.launch.head`) only connects the agents and decides how the run ends. `run_as_agent` connects this
process to the head, does the node's work, reports how it ended and waits for the verdict: one exit code and one root
cause for all nodes. If the connection breaks, the agent ends its ranks. The ranks themselves are started and watched as
on one machine (`kumi.launch.local`).
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from kumi import __version__
from kumi.errors import OK, CommunicationError, ConfigError
from kumi.launch.early_failure import OtherNodeFailedError, tell_others
from kumi.launch.failure_causes import PRIMARY, UNKNOWN, RootCause
from kumi.launch.head import fork_head, listen
from kumi.launch.head_messages import (
    BEATS,
    HELLO_SECONDS,
    LINE_BYTES,
    decode,
    encode,
    is_proof,
    new_nonce,
    proof,
    watch_connection,
)
from kumi.launch.signals import EXIT_CODES, exit_code
from kumi.launch.standing import LOOPBACK, Standing, interface_to
from kumi.launch.verdict import Report, Verdict, early_failure, failure_report

_CONNECT_SECONDS = 600.0  # the head may start later than this agent
_REFUSED_SECONDS = 20.0  # the head of an earlier attempt may still answer
_DOCTOR_SECONDS = 3.0  # node 0 may still make the checks of an earlier attempt
_PROBE_SECONDS = 2.0  # `HeadProbe` waits this long for an answer of node 0
_NOTE_SECONDS = 20.0  # the agent then says that it waits for the head
_HEAD_LEAVES_SECONDS = 20.0  # the head has this long to end after the run
# Interrupts the main thread while it does not watch ranks. While it does, this signal makes torch's agent give up
# ranks.
_INTERRUPT = signal.SIGUSR2

# Connections of this process. A child that kept one open would hide from the head that this process died.
_connections: list[socket.socket] = []


def _close_connections() -> None:
    while _connections:
        _connections.pop().close()


os.register_at_fork(after_in_child=_close_connections)


class _Interrupted(BaseException):
    """Raised in the main thread when the head ends this agent, or is lost."""


class HeadLink:
    """The connection of an agent to the head. A thread reads the head's messages and sends heartbeats.

    `unread`: bytes that were read behind the first lines. `lost_after`: seconds of silence after which the head is
    lost. `port`: port of the store. `address`: address of this node as other nodes reach it. `port` and `address` are
    set once `wait_for_all` has returned.
    """

    def __init__(self, standing: Standing, connection: socket.socket, unread: bytes, lost_after: float) -> None:
        self.standing = standing
        self.cause: RootCause | None = None  # why the ranks of this node failed
        self.forced = False  # a second stop request ended the ranks at once
        self.decided = False  # the verdict is here, or the head is lost
        self.stopping = False  # the head ends this agent, or is lost: no rank may go on
        self.port, self.address = 0, ""
        self._connection, self._unread, self._lost_after = connection, unread, lost_after
        self._generation = 0  # of the ranks (see kumi.launch.head_messages)
        self._arrived: dict[str, dict[str, Any]] = {}  # type of a message -> the last one
        self._changed = threading.Condition()
        self._send_lock = threading.Lock()
        self._gone = ""  # why the head is lost
        self._has_thread = False
        self._watching = False  # within `watching`
        self._reporting = False  # the work has ended: only the report and the verdict are left
        self._main = threading.main_thread().ident or 0
        self._store: Any = None

    def start_thread(self) -> None:
        """Start the thread that reads messages. From now on, the head can end this agent."""
        self._has_thread = True
        threading.Thread(target=self._run, name="kumi-link", daemon=True).start()

    def broadcast(self, message: str) -> None:
        """Send `message` to all other nodes. For node 0."""
        self._send("broadcast", text=message)

    def receive(self) -> str:
        """Wait for the message of node 0, however long it prepares the data, and return it. For the other nodes."""
        return str(self._await("broadcast")["text"])

    def wait_for_all(self) -> None:
        """Wait until all nodes can start their ranks. Node 0 serves the store of all ranks from then on."""
        if self.standing.node == 0:
            self._store, self.port = _serve_store()
        self._send("ready", store=self.port)
        start = self._await("start")
        self.port = int(start["store"])
        self.address = str(start["address"])

    def note_started(self) -> None:
        """Tell the head that the ranks of this node are forked."""
        self._send("started")

    def may_begin(self) -> bool:
        """Return True once the ranks of all nodes are forked."""
        return "go" in self._arrived

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within the block, the caller ends the ranks if the link is `stopping`; the main thread is not interrupted.

        At the end of the block, raise _Interrupted if the link is `stopping`.
        """
        self._watching = True
        try:
            yield
        finally:
            self._send("returned")
            self._watching = False
        if self.stopping:
            raise _Interrupted

    def interrupt(self, signum: int, frame: FrameType | None) -> None:
        """Handle the signal by which the thread interrupts the main thread."""
        if self.stopping and not self._watching and not self._reporting:
            raise _Interrupted

    @property
    def interface(self) -> str | None:
        """The network interface by which this node reaches the others; None if it has no name."""
        return interface_to(self.address)

    def end_work(self) -> None:
        """End the work that the head may interrupt: from now on, this agent only waits for the verdict."""
        self._reporting = True

    def settle(self, report: Report) -> Verdict:
        """Send how this agent ended, and wait for the verdict. Raise CommunicationError if the head is lost."""
        if not self._has_thread:
            self.start_thread()
        self._send("ended", report=report.to_json(time.monotonic()))
        return Verdict(**self._await("verdict")["verdict"])

    def close(self) -> None:
        """Close the connection, which ends the thread."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        if self._connection in _connections:
            _connections.remove(self._connection)
        self._connection.close()

    def _await(self, kind: str) -> dict[str, Any]:
        """Wait for a message of the type `kind` and return it.

        Raise CommunicationError if the head is lost, and _Interrupted if it ends this agent.
        """
        with self._changed:
            while kind not in self._arrived:
                if self._gone:
                    raise CommunicationError(self._gone)
                if self.stopping and not self._reporting:
                    raise _Interrupted
                self._changed.wait(0.5)
            return self._arrived[kind]

    def _send(self, kind: str, **content: Any) -> None:
        line = encode({"type": kind, "generation": self._generation, **content})
        with suppress(OSError), self._send_lock:  # the thread notices a broken connection
            self._connection.sendall(line)

    def _run(self) -> None:
        """Read the head's messages and send heartbeats, until the connection is closed or the head is lost."""
        signal.pthread_sigmask(signal.SIG_BLOCK, EXIT_CODES)  # only the main thread receives signals
        head, rest = self.standing.head, self._unread
        heard = beat_at = time.monotonic()
        try:
            while True:
                if time.monotonic() >= beat_at:
                    beat_at = time.monotonic() + self._lost_after / BEATS
                    self._send("beat")
                if select.select([self._connection], [], [], min(1.0, self._lost_after / BEATS))[0]:
                    data = self._connection.recv(2**16)
                    if not data:
                        raise ConnectionError("closed")
                    heard = time.monotonic()
                    *lines, rest = (rest + data).split(b"\n")
                    for line in lines:
                        self._receive(decode(line))
                elif time.monotonic() - heard > self._lost_after:
                    raise TimeoutError(f"silent for {self._lost_after:g} s")
        except (OSError, ValueError) as error:
            self._stop(
                f"node {self.standing.node} lost its connection to the head at {head} ({error}), so its ranks were "
                f"ended; see the output of node 0, and run the same command again to resume from the last checkpoint"
            )

    def _receive(self, message: dict[str, Any]) -> None:
        """Store a message of the head for `_await`. A stop or a verdict ends the work of this node."""
        kind = message["type"]
        with self._changed:
            self._arrived[kind] = message
            self._changed.notify_all()
        if kind in ("stop", "verdict"):
            self._stop()

    def _stop(self, gone: str = "") -> None:
        """Let the ranks and the work of this node end. `gone`: why the head is lost, if it is."""
        with self._changed:
            self.decided = self.decided or bool(gone) or "verdict" in self._arrived
            self.stopping, self._gone = True, gone or self._gone
            self._changed.notify_all()
        if not self._watching and not self._reporting:
            signal.pthread_kill(self._main, _INTERRUPT)


def _serve_store() -> tuple[Any, int]:
    """Return the store of all ranks, which this process serves, and its port, which the kernel chooses."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    dualstack = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dualstack else socket.AF_INET
    listener = socket.create_server(("", 0), family=family, dualstack_ipv6=dualstack)
    port = listener.getsockname()[1]
    host = "::1" if dualstack else "127.0.0.1"
    return TCPStore(host, port, 1, is_master=True, multi_tenant=True, master_listen_fd=listener.detach()), port


def run_as_agent(standing: Standing, token: str, lost_after: float, work: Callable[[HeadLink], int]) -> int:
    """Run `work(link)` as the agent of a node, and return the exit code of the whole run.

    `work` calls `link.start_thread()` once this process may have threads. `token`: secret of the run. `lost_after`:
    seconds after which a silent peer is lost. Raise the KumiError of the run's root cause, on whichever node it is;
    ConfigError if the head refuses this agent; CommunicationError if the head cannot be reached or is lost.
    """
    head = None if standing.node else fork_head(listen(standing.head), standing.nodes, token, lost_after)
    try:
        try:
            connection, unread = _connect(standing, token, lost_after)
        except OtherNodeFailedError as other:
            raise other.error(standing.node) from None
        link = HeadLink(standing, connection, unread, lost_after)
        before = signal.signal(_INTERRUPT, link.interrupt)
        try:
            return _run(link, work)
        finally:
            signal.signal(_INTERRUPT, before)
            link.close()
    finally:
        if head is not None:
            _await_head(head)


def _run(link: HeadLink, work: Callable[[HeadLink], int]) -> int:
    """Do the `work`, report its end, and return the verdict's exit code or raise the verdict's error."""
    node = link.standing.node
    failure: BaseException | None = None
    try:
        try:
            code = work(link)
            report = Report(node, code, PRIMARY if link.forced else None, time.monotonic())
        finally:
            link.end_work()
    except _Interrupted:
        report = Report(node, OK)
    except BaseException as error:
        failure, report = error, _report(link, error)
    verdict = link.settle(report)
    agreed = verdict.error(node)
    # This node's own error is the root cause, or this process was told to exit: raise the exception itself.
    is_own = verdict.node == node and verdict.message == report.message
    has_left = isinstance(failure, SystemExit | KeyboardInterrupt) and report.code == verdict.code
    if failure is not None and (is_own or has_left):
        raise failure
    if agreed is not None:
        raise agreed from failure
    return verdict.code


def _report(link: HeadLink, error: BaseException) -> Report:
    """Return the report of an agent whose work ended with `error`."""
    node, cause = link.standing.node, link.cause
    if isinstance(error, KeyboardInterrupt):
        return Report(node, exit_code(signal.SIGINT))
    if isinstance(error, SystemExit):
        return Report(node, error.code if isinstance(error.code, int) else int(error.code is not None))
    if link.stopping and cause is not None and cause.error is error and cause.severity == UNKNOWN:
        return Report(node, OK, silent=cause.silent)  # its ranks were ended because of another node
    return failure_report(node, error, cause, time.monotonic())


def _connect(standing: Standing, token: str, lost_after: float) -> tuple[socket.socket, bytes]:
    """Connect to the head, which may not listen yet, and return the connection once both have proved their token.

    Also return the bytes that have been read behind the head's proof.
    """
    began, noted = time.monotonic(), False
    refused_at: float | None = None
    host = standing.head.host
    if standing.node == 0 and host not in LOOPBACK:
        host = "127.0.0.1"  # the head's name may be that of a service, which does not lead here yet
    while True:
        try:
            return _greet(standing, host, token, lost_after)
        except _Refused as refusal:
            now = time.monotonic()
            refused_at = now if refused_at is None else refused_at
            if now - refused_at > (_DOCTOR_SECONDS if refusal.by_doctor else _REFUSED_SECONDS):
                error = _refused_error(standing, refusal)
                if refusal.by_doctor:
                    tell_others(standing, error)
                raise error from None
        except OSError as error:
            if time.monotonic() - began > _CONNECT_SECONDS:
                raise CommunicationError(
                    f"node {standing.node} cannot reach the head at {standing.head} ({error}); check that node 0 runs, "
                    f"that this is its address, and that no firewall closes the port"
                ) from error
        if not noted and time.monotonic() - began > _NOTE_SECONDS:
            noted = True
            print(f"node {standing.node}     waits for the head at {standing.head}", file=sys.stderr, flush=True)
        time.sleep(0.2)


class _Refused(Exception):
    """The head, or another program at its port, refuses this agent.

    `by_doctor`: node 0 is making the checks of kumi doctor.
    """

    def __init__(self, reason: str, *, by_doctor: bool = False) -> None:
        super().__init__(reason)
        self.by_doctor = by_doctor


class HeadProbe:
    """Finds out whether node 0 has its head, before this node's agent connects to the head."""

    def __init__(self, standing: Standing) -> None:
        self._standing = standing
        self._refused_at: float | None = None

    def has_head(self) -> bool:
        """Return True once a head answers at the address of node 0.

        Raise OtherNodeFailedError if node 0 has failed, and ConfigError if it goes on with the checks of kumi doctor,
        in which this node does not take part.
        """
        address = (self._standing.head.host, self._standing.head.port)
        try:
            with socket.create_connection(address, timeout=_PROBE_SECONDS) as connection:
                return "kumi" in _greeting(connection, self._standing)[0]
        except (OSError, ValueError):
            return False
        except _Refused as refusal:
            self._refused_at = self._refused_at or time.monotonic()
            if refusal.by_doctor and time.monotonic() - self._refused_at > _DOCTOR_SECONDS:
                raise _refused_error(self._standing, refusal) from None
            return False


def _refused_error(standing: Standing, refusal: _Refused) -> ConfigError:
    return ConfigError(
        f"the head at {standing.head} refuses node {standing.node}: {refusal}; start `kumi train` once on each node, "
        f"with the same run file, and give each run a port of its own"
    )


def _greet(standing: Standing, host: str, token: str, lost_after: float) -> tuple[socket.socket, bytes]:
    """Connect to the head once and exchange the first lines; see `_connect`. Raise OSError or _Refused on failure."""
    connection = socket.create_connection((host, standing.head.port), timeout=HELLO_SECONDS)
    try:
        watch_connection(connection, lost_after)
        greeting, rest = _greeting(connection, standing)
        if greeting["kumi"] != __version__:
            raise _Refused(f"node 0 has version {greeting['kumi']} of kumi, and this node {__version__}")
        nonce, place = new_nonce(), (standing.node, standing.nodes)
        hello = {"node": place[0], "nodes": place[1], "nonce": nonce}
        connection.sendall(encode({**hello, "proof": proof(token, str(greeting["nonce"]), *place)}))
        line, rest = _read_line(connection, rest)
        answer = decode(line)
        if "refused" in answer:
            raise _Refused(answer["refused"])
        if not is_proof(answer["proof"], token, nonce):
            raise _Refused("it cannot prove that it is of the same run")
    except (ValueError, KeyError):
        connection.close()
        raise _Refused("another program answers there") from None
    except BaseException:
        connection.close()
        raise
    connection.settimeout(None)
    _connections.append(connection)
    return connection, rest


def _greeting(connection: socket.socket, standing: Standing) -> tuple[dict[str, Any], bytes]:
    """Return the greeting of the head, and the bytes that were read after it.

    Raise _Refused if another program answers, or if node 0 makes the checks of kumi doctor, and OtherNodeFailedError if
    node 0 has failed.
    """
    try:
        line, rest = _read_line(connection, b"")
    except TimeoutError:
        raise _Refused("another program answers there, and says nothing") from None
    greeting = decode(line)
    report = early_failure(greeting, standing.nodes, time.monotonic())
    if report is not None:
        connection.sendall(encode({"node": standing.node}))
        raise OtherNodeFailedError(report)
    if "protocol" in greeting:
        reason = "it makes the checks of kumi doctor first, which train.doctor=false leaves out on this node"
        raise _Refused(reason, by_doctor=True)
    return greeting, rest


def _read_line(connection: socket.socket, rest: bytes) -> tuple[bytes, bytes]:
    """Return the next line, and the bytes that were read after it. `rest`: bytes that were read before."""
    while b"\n" not in rest:
        data = connection.recv(2**16)
        if not data or len(rest) > LINE_BYTES:
            raise ConnectionError("the connection was closed")
        rest += data
    line, _, rest = rest.partition(b"\n")
    return line, rest


def _await_head(pid: int) -> None:
    """Wait until the head has ended, so that no process is left."""
    until = time.monotonic() + _HEAD_LEAVES_SECONDS
    while os.waitpid(pid, os.WNOHANG)[0] == 0:
        if time.monotonic() > until:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
