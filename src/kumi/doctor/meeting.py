"""The nodes meet at the head: one TCP connection from each node to node 0, with lines of JSON. No torch here.

    node 0   listens at the head's port, welcomes the nodes that come in time, and collects and distributes values
    others   connect, say which node they are, send values and receive those of all

    node 0 -> node    {"protocol": ...}                            at once
    node -> node 0    {"protocol": ..., "node": 1, "nodes": 4, "host": ...}
    node 0 -> node    {"hosts": {...}} once all have come, or {"refused": REASON}

A node that failed before it came sends its failure instead of a greeting (`kumi.launch.early_failure`), and all nodes
end with that failure.

A node that dies closes its connection, so the others learn at once who is gone. At the end node 0 closes its port
before its connections: a node that has seen its connection end may use the same port of the head again.
"""

from __future__ import annotations

import selectors
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from kumi.errors import CommunicationError, ConfigError
from kumi.launch.early_failure import OtherNodeFailedError
from kumi.launch.head import listen
from kumi.launch.head_messages import decode, encode
from kumi.launch.standing import HeadAddress
from kumi.launch.verdict import Report, early_failure, failure_message
from kumi.safe_output import visible

_PROTOCOL = "kumi doctor 2"
# The longest message, and the time in which a node must take one.
_LONGEST_LINE = 64 * 2**20
_SEND_SECONDS = 10.0
_CONNECT_SECONDS = 3.0
_RETRY_SECONDS = 0.2
# Node 0 takes its own readings before it greets.
_GREETING_SECONDS = 30.0
# After the failure of a node, the others have this long to come and hear of it.
_LATE_SECONDS = 10.0
# Node 0 may be late by this much, because it waits for the slowest node and judges.
_HEAD_SECONDS = 10.0


@dataclass(frozen=True)
class Seat:
    """The place of this process among those that examine their nodes.

    `node`, `nodes`: its number and how many there are.
    `host`, `port`: the address of the head; empty with one node.
    `noun`: node, or rank where a launcher started one process per device.
    """

    node: int = 0
    nodes: int = 1
    host: str = ""
    port: int = 0
    noun: str = "node"


class Meeting:
    """The nodes that met, as seen from one of them. This class is a meeting of one node; `_Head` and `_Peer` are
    meetings of several.

    `hosts`: host names by node, of those that met.
    `lost`: nodes that left or were silent, and the topic of the message that the others expected from them.
    """

    def __init__(self, seat: Seat) -> None:
        self.seat = seat
        self.hosts: dict[int, str] = {seat.node: socket.gethostname()}
        self.lost: dict[int, str] = {}

    @property
    def members(self) -> list[int]:
        """The numbers of the nodes that met and have not left, in order."""
        return sorted(set(self.hosts) - set(self.lost))

    def exchange(self, topic: str, value: Any, seconds: float) -> dict[int, Any]:
        """Send `value` to all members and return the values of all, by node; wait at most about `seconds`.

        All members call this with the same `topic` in the same order. A member that leaves or is silent becomes lost.
        Raise CommunicationError if node 0 left.
        """
        return {self.seat.node: value}

    def call(self, node: int, topic: str, seconds: float) -> Any:
        """Return the reply of `node`, which is in `answer` with the same `topic`; None if it is lost. For node 0."""
        raise NotImplementedError("a meeting of one node has no other to call")

    def answer(self, topic: str, reply: Callable[[], Any], seconds: float) -> None:
        """Reply to each call of node 0 with `topic` until it calls "end". For nodes other than 0.

        Raise CommunicationError if no call comes within `seconds`, or if node 0 left.
        """
        raise NotImplementedError("a meeting of one node has nobody to answer")

    def close(self) -> None:
        """End the meeting. Other nodes than node 0 wait until node 0 has closed its port."""


class PortTakenError(CommunicationError):
    """Node 0 cannot listen at the head's port."""


class HeadUnreachableError(CommunicationError):
    """This node cannot take part: node 0 does not answer, or refuses it."""


class _Line:
    """A connection that carries one JSON object per line."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._buffer = bytearray()
        with suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, message: dict[str, Any]) -> None:
        self.connection.settimeout(_SEND_SECONDS)
        self.connection.sendall(encode(message))

    def receive(self, until: float) -> dict[str, Any] | None:
        """Return the next message; None if the other side left. Raise TimeoutError at the time `until`."""
        while (message := self.next()) is None:
            self.connection.settimeout(max(0.001, until - time.monotonic()))
            if not self.read():
                return None
        return message

    def read(self) -> bool:
        """Read some bytes; return False if the other side left, or if its message is too long."""
        try:
            data = self.connection.recv(2**18)
        except ConnectionError:
            return False
        self._buffer += data
        return bool(data) and len(self._buffer) <= _LONGEST_LINE

    def next(self) -> dict[str, Any] | None:
        """Return the next message that has been read completely, or None. Raise ValueError if it is no object."""
        end = self._buffer.find(b"\n")
        if end < 0:
            return None
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        return decode(line)

    def close(self) -> None:
        self.connection.close()


class _Head(Meeting):
    """The meeting as seen from node 0."""

    def __init__(self, seat: Seat) -> None:
        """Open the port. Raise PortTakenError if that fails."""
        super().__init__(seat)
        self._lines: dict[int, _Line] = {}
        self.refused: list[str] = []  # why nodes were turned away
        self._failure: Report | None = None  # of the first node that failed before it could take part
        try:
            self._listener = listen(HeadAddress(seat.host, seat.port))
        except ConfigError as error:
            raise PortTakenError(str(error)) from error

    def gather(self, until: float) -> None:
        """Welcome nodes until all are there, or until the time `until`; then tell all who came.

        Raise OtherNodeFailedError if a node says that it has failed, which all others are told.
        """
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            while self._is_incomplete() and (left := until - time.monotonic()) > 0:
                for key, _ in selector.select(left):
                    if key.fileobj is self._listener:
                        self._accept(selector)
                    elif (accepted := self._welcome(key.data)) is not None:
                        selector.unregister(key.fileobj)
                        if not accepted:
                            key.data.close()
                if self._failure is not None:
                    until = min(until, self._failure.at + _LATE_SECONDS)
            for key in list(selector.get_map().values()):
                if key.data is not None:  # connected, but sent no greeting
                    key.data.close()
        if self._failure is not None:
            self._send_all(failure_message(self._failure, self.seat.nodes))
            raise OtherNodeFailedError(self._failure)
        self._send_all({"hosts": self.hosts})

    def _is_incomplete(self) -> bool:
        """Return True while a node has neither come nor failed."""
        return len(self._lines) + (self._failure is not None) < self.seat.nodes - 1

    def _accept(self, selector: selectors.BaseSelector) -> None:
        line = _Line(self._listener.accept()[0])
        with suppress(OSError):
            line.send({"protocol": _PROTOCOL})
        selector.register(line.connection, selectors.EVENT_READ, line)

    def _welcome(self, line: _Line) -> bool | None:
        """Read the greeting of a new connection. Return True if the node is welcome, False if not, None if
        the greeting is incomplete."""
        try:
            alive, greeting = line.read(), line.next()
        except ValueError:
            return False
        if greeting is None:
            return None if alive else False
        failure = early_failure(greeting, self.seat.nodes, time.monotonic())
        if failure is not None and failure.node and failure.node not in self._lines:
            self._failure = self._failure or failure
            with suppress(OSError):
                line.send({"noted": True})
            return False
        node, nodes, nouns = greeting.get("node"), greeting.get("nodes"), f"{self.seat.noun}s"
        if greeting.get("protocol") != _PROTOCOL or type(node) is not int:
            reason = f"a process connected that does not speak the protocol {_PROTOCOL!r}"
        elif nodes != self.seat.nodes:
            reason = f"{self.seat.noun} {node} expects {nodes} {nouns}, and node 0 {self.seat.nodes}"
        elif not 0 < node < self.seat.nodes or node in self._lines:
            reason = f"two processes are {self.seat.noun} {node} of {self.seat.nodes}"
        else:
            self._lines[node], self.hosts[node] = line, str(greeting.get("host", ""))[:64]
            return True
        if reason not in self.refused:  # at once, since the others may still come for long
            print(visible(f"doctor     refused: {reason}"), file=sys.stderr, flush=True)
        self.refused.append(reason)
        with suppress(OSError):
            line.send({"refused": reason})
        return False

    def exchange(self, topic: str, value: Any, seconds: float) -> dict[int, Any]:
        values, until = {0: value}, time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            for node in self.members[1:]:
                if not self._take(node, topic, values):  # it may have come together with an earlier message
                    selector.register(self._lines[node].connection, selectors.EVENT_READ, node)
            while selector.get_map() and (left := until - time.monotonic()) > 0:
                for key, _ in selector.select(left):
                    alive = self._lines[key.data].read()
                    if self._take(key.data, topic, values):
                        selector.unregister(key.fileobj)
                    elif not alive:
                        selector.unregister(key.fileobj)
                        self._lose(key.data, topic)
            for key in list(selector.get_map().values()):
                self._lose(key.data, topic)
        self._send_all({"topic": topic, "values": values, "lost": self.lost})
        return {node: values[node] for node in sorted(values) if node not in self.lost}

    def _take(self, node: int, topic: str, values: dict[int, Any]) -> bool:
        """Put the value of `node` into `values` if its message has been read. Return True if no more is expected of the
        node: its value has come, or it has sent another message and is lost."""
        try:
            message = self._lines[node].next()
        except ValueError:
            message = {}
        if message is None:
            return False
        if message.get("topic") == topic:
            values[node] = message.get("value")
        else:
            self._lose(node, topic)
        return True

    def call(self, node: int, topic: str, seconds: float) -> Any:
        try:
            self._lines[node].send({"call": topic})
            message = self._lines[node].receive(time.monotonic() + seconds)
        except (OSError, ValueError):
            message = None
        if message is None or message.get("reply") != topic:
            self._lose(node, topic)
            return None
        return message.get("value")

    def _send_all(self, message: dict[str, Any]) -> None:
        for node in self.members[1:]:
            try:
                self._lines[node].send(message)
            except OSError:
                self._lose(node, str(message.get("topic", "the greeting")))

    def _lose(self, node: int, topic: str) -> None:
        if node not in self.lost:
            self.lost[node] = topic
            self._lines[node].close()

    def close(self) -> None:
        self._listener.close()
        for line in self._lines.values():
            line.close()


class _Peer(Meeting):
    """The meeting as seen from a node other than 0."""

    def __init__(self, seat: Seat) -> None:
        super().__init__(seat)
        self._line: _Line | None = None

    def gather(self, until: float) -> None:
        """Connect to node 0 until the time `until`, and wait until it knows who came.

        Raise HeadUnreachableError if node 0 does not answer, or refuses this node, and OtherNodeFailedError if a node
        has failed.
        """
        line = _Line(_connect(self.seat, until))
        try:
            self.hosts = self._greet(line, until)
        except BaseException:
            line.close()
            raise
        self._line = line

    def _greet(self, line: _Line, until: float) -> dict[int, str]:
        """Greet node 0, and return the host names of the nodes that came, by node. Raise as `gather` does."""
        seat, where = self.seat, f"{self.seat.host}:{self.seat.port}"
        greeting = {"protocol": _PROTOCOL, "node": seat.node, "nodes": seat.nodes, "host": self.hosts[seat.node]}
        try:
            line.send(greeting)
            welcome = line.receive(time.monotonic() + _GREETING_SECONDS)
            if welcome is not None and "protocol" in welcome:
                welcome = line.receive(until + _HEAD_SECONDS)
        except (OSError, ValueError) as error:
            raise HeadUnreachableError(f"{where} answers, but not as kumi doctor ({error})") from error
        failure = early_failure(welcome or {}, seat.nodes, time.monotonic())
        if failure is not None:
            raise OtherNodeFailedError(failure)
        if welcome is not None and "kumi" in welcome:
            raise HeadUnreachableError(
                f"node 0 at {where} trains without these checks: train.doctor is false there, and true on {seat.noun} "
                f"{seat.node}"
            )
        if welcome is None or "hosts" not in welcome:
            reason = (welcome or {}).get("refused", "it closed the connection")
            raise HeadUnreachableError(f"node 0 at {where} refuses {seat.noun} {seat.node}: {reason}")
        return {int(node): str(host) for node, host in welcome["hosts"].items()}

    def exchange(self, topic: str, value: Any, seconds: float) -> dict[int, Any]:
        message = self._exchange(topic, value, seconds)
        self.lost = {int(node): str(during) for node, during in message.get("lost", {}).items()}
        values = {int(node): value for node, value in message.get("values", {}).items()}
        return {node: values[node] for node in sorted(values) if node not in self.lost}

    def _exchange(self, topic: str, value: Any, seconds: float) -> dict[str, Any]:
        try:
            self._connected().send({"topic": topic, "value": value})
            message = self._connected().receive(time.monotonic() + seconds + _HEAD_SECONDS)
        except (OSError, ValueError) as error:
            raise self._gone(topic) from error
        if message is None or message.get("topic") != topic:
            raise self._gone(topic)
        return message

    def answer(self, topic: str, reply: Callable[[], Any], seconds: float) -> None:
        try:
            while True:
                message = self._connected().receive(time.monotonic() + seconds)
                if message is None or message.get("call") not in (topic, "end"):
                    raise self._gone(topic)
                self._connected().send({"reply": message["call"], "value": reply()})
                if message["call"] == "end":
                    return
        except (OSError, ValueError) as error:
            raise self._gone(topic) from error

    def _connected(self) -> _Line:
        assert self._line is not None, "gather comes first"
        return self._line

    def _gone(self, topic: str) -> CommunicationError:
        return CommunicationError(
            f"node 0 at {self.seat.host}:{self.seat.port} ended, or gave up on this {self.seat.noun}, during "
            f"{topic!r}; see its output for the reason"
        )

    def close(self) -> None:
        if self._line is not None:
            with suppress(OSError, ValueError):
                self._line.receive(time.monotonic() + _HEAD_SECONDS)  # node 0 closes its port, then this connection
            self._line.close()


@contextmanager
def open_meeting(seat: Seat) -> Iterator[Meeting]:
    """Open the meeting of all nodes for the duration of the block; `gather` completes it.

    Raise PortTakenError on node 0 if the head's port cannot be opened.
    """
    meeting = Meeting(seat) if seat.nodes == 1 else _Head(seat) if seat.node == 0 else _Peer(seat)
    try:
        yield meeting
    finally:
        meeting.close()


def gather(meeting: Meeting, until: float) -> list[str]:
    """Wait for all nodes until the time `until`; return on node 0 why it turned processes away, and [] on others.

    Raise HeadUnreachableError on a node that cannot take part.
    """
    if isinstance(meeting, _Head | _Peer):
        meeting.gather(until)
    return meeting.refused if isinstance(meeting, _Head) else []


def _connect(seat: Seat, until: float) -> socket.socket:
    """Return a connection to node 0; try again until the time `until`. Raise HeadUnreachableError."""
    while True:
        left = until - time.monotonic()
        try:
            return socket.create_connection((seat.host, seat.port), timeout=max(0.1, min(_CONNECT_SECONDS, left)))
        except OSError as error:
            if left < _RETRY_SECONDS:
                reason = error.strerror or str(error)
                raise HeadUnreachableError(
                    f"{seat.noun} {seat.node} cannot reach node 0 at {seat.host}:{seat.port} ({reason})"
                ) from error
            time.sleep(_RETRY_SECONDS)
