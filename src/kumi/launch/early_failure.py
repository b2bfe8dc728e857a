"""A node that fails before its agent is connected tells the others why, so that none of them waits for it.

    node 0           if it fails, listens at the head's port for a while, and sends this line to each node that connects
    another node     if it fails, sends this line to node 0, at whose port the doctor's checks or the head listen

    {"node": 1, "nodes": 4, "failed": {"code": 2, "kind": "ConfigError", "message": "..."}}
    {"noted": true}            node 0 has read it

The line needs no token, because a node whose run file cannot be read does not have one. Node 0 believes the line only
as long as the agent of the node that the line names has not connected.
"""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from kumi.errors import ConfigError, KumiError
from kumi.launch.head import listen
from kumi.launch.head_messages import HELLO_SECONDS, LINE_BYTES, decode, encode
from kumi.launch.standing import LaunchedRank, Standing
from kumi.launch.verdict import Report, decide, failure_message, failure_report

_TELL_SECONDS = 60.0  # the others may start later than this node
_NOTE_SECONDS = 3.0  # the user then sees the error while the others are told
_RETRY_SECONDS = 0.2
_ANSWER_SECONDS = 2.0  # for a node to answer node 0
_HEAD_SECONDS = 20.0  # node 0 may be busy before it answers


class OtherNodeFailedError(Exception):
    """Another node has failed before it could take part. `report`: how it ended."""

    def __init__(self, report: Report) -> None:
        super().__init__(report.message)
        self.report = report

    def error(self, node: int) -> KumiError:
        """Return the error for this `node` to raise."""
        error = decide([self.report]).error(node)
        assert error is not None, "the report is about a failure"
        return error


@contextmanager
def telling_others_of_errors(standing: Standing | LaunchedRank | None) -> Iterator[None]:
    """Within the block, an error of this node is also told to the other nodes, for at most a minute.

    Use it for what a node does before its agent is connected. Without other nodes it does nothing. If another node
    has failed (OtherNodeFailedError), raise its error.
    """
    try:
        yield
    except OtherNodeFailedError as other:
        assert isinstance(standing, Standing), "there is another node"
        raise other.error(standing.node) from None
    except Exception as error:
        if isinstance(standing, Standing):
            tell_others(standing, error)
        raise


def tell_others(standing: Standing, error: BaseException) -> None:
    """Tell the other nodes that this node has failed with `error`, with which the run ends."""
    line = encode(failure_message(failure_report(standing.node, error, None, time.monotonic()), standing.nodes))
    note = _Note(standing, error)
    if standing.node == 0:
        _tell_nodes(standing, line, note)
    else:
        _tell_head(standing, line, note)


class _Note:
    """Prints the error if telling the other nodes takes long, as the user need not wait for it."""

    def __init__(self, standing: Standing, error: BaseException) -> None:
        self._at: float | None = time.monotonic() + _NOTE_SECONDS
        whom = "node 0" if standing.node else "the other nodes"
        self._text = (
            f"node {standing.node}     failed, and tells {whom} for up to {_TELL_SECONDS:.0f} s: "
            f"{type(error).__name__}: {error}"
        )

    def show_when_due(self) -> None:
        if self._at is not None and time.monotonic() > self._at:
            self._at = None
            print(self._text, file=sys.stderr, flush=True)


def _tell_head(standing: Standing, line: bytes, note: _Note) -> None:
    """Send `line` to node 0 until it answers. Give up if another program is at the port."""
    until = time.monotonic() + _TELL_SECONDS
    while time.monotonic() < until:
        with suppress(OSError):
            address = (standing.head.host, standing.head.port)
            with socket.create_connection(address, timeout=HELLO_SECONDS) as connection:
                try:
                    if _send_line(connection, line):
                        return
                except (TimeoutError, ValueError):
                    return
        note.show_when_due()
        time.sleep(_RETRY_SECONDS)


def _send_line(connection: socket.socket, line: bytes) -> bool:
    """Send `line`; return True once it is answered, False if node 0 closes the connection before.

    Raise TimeoutError if nothing comes, and ValueError if something comes that is not a message.
    """
    connection.settimeout(_HEAD_SECONDS)
    connection.sendall(line)
    with connection.makefile("rb") as answers:
        while answer := answers.readline(LINE_BYTES):  # a greeting, then the answer
            if {"noted", "refused", "failed"} & set(decode(answer)):
                return True
    return False


def _tell_nodes(standing: Standing, line: bytes, note: _Note) -> None:
    """Give `line` to each other node that connects, until all have come."""
    try:
        listener = listen(standing.head, patience=0.0)
    except ConfigError:
        return
    told: set[int] = set()
    until = time.monotonic() + _TELL_SECONDS
    with listener:
        listener.settimeout(_RETRY_SECONDS)
        while len(told) < standing.nodes - 1 and time.monotonic() < until:
            with suppress(OSError, ValueError):
                connection, _ = listener.accept()
                with connection:
                    connection.settimeout(_ANSWER_SECONDS)
                    connection.sendall(line)
                    with connection.makefile("rb") as answers:
                        node = decode(answers.readline(LINE_BYTES)).get("node")
                    if type(node) is int and 0 < node < standing.nodes:
                        told.add(node)
            note.show_when_due()
