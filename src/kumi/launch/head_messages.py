"""What the head of a run and the agents of its nodes say to each other: JSON lines on one TCP connection per agent.

    head  -> agent    {"kumi": VERSION, "nonce": N}
    agent -> head     {"node": 1, "nodes": 4, "nonce": M, "proof": HMAC(token, N, node, nodes)}
    head  -> agent    {"proof": HMAC(token, M)}, or {"refused": REASON}

A node that fails before this sends another line instead (`kumi.launch.early_failure`). After these lines:

    agent -> head     broadcast     node 0 has prepared the data: text for the other nodes
    head  -> agent    broadcast     that text
    agent -> head     ready         the node can start its ranks; node 0 names the port of the store of all ranks
    head  -> agent    start         all nodes are ready: port of the store, and this node's address as others see it
    agent -> head     started       the ranks of the node are forked
    head  -> agent    go            the ranks of all nodes are forked: they may connect to the store
    agent -> head     returned      the ranks of the node have ended
    agent -> head     ended         how the agent ends: a Report
    head  -> agent    stop          another node ended early: end the ranks and report
    head  -> agent    verdict       how all agents end: a Verdict
    both              beat          I am alive

Messages name the generation of the ranks that they are about, and a head ignores messages about another generation. The
generation is 0 in all runs so far: a head that started ranks anew after a failure would count it up.

The token is a secret that the nodes of a run share (`kumi.train.run_folder.run_token`). It keeps the agents of two runs
apart, and strangers out; what is sent is neither secret nor protected against someone who controls the network.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
from typing import Any

from kumi.files.untrusted import CONFIG, strict_json

LINE_BYTES = 2**20  # most bytes of a message; the text of an error has at most 4,000 characters
HELLO_SECONDS = 10.0  # time for the first three lines
BEATS = 5  # beats in the time after which a silent peer counts as lost
_KEEPALIVE_PROBES = 3


def new_nonce() -> str:
    """Return a random text that was never used before."""
    return secrets.token_hex(16)


def proof(token: str, *words: str | int) -> str:
    """Return a digest of `words` that only someone with the `token` can make."""
    return hmac.new(token.encode(), json.dumps(words).encode(), "sha256").hexdigest()


def is_proof(text: object, token: str, *words: str | int) -> bool:
    """Return True if `text` is the proof for `words`."""
    return isinstance(text, str) and hmac.compare_digest(text.encode(), proof(token, *words).encode())


def encode(message: dict[str, Any]) -> bytes:
    """Return the line of a message."""
    return json.dumps(message).encode() + b"\n"


def decode(line: bytes) -> dict[str, Any]:
    """Return the message in `line`. Raise ValueError if the line is not a message."""
    message = strict_json(line, CONFIG)
    if not isinstance(message, dict):
        raise ValueError("a message is an object")
    return message


def watch_connection(connection: socket.socket, lost_after: float) -> None:
    """Have the kernel end `connection` once the other machine has not answered for about `lost_after` seconds."""
    seconds = max(1, round(lost_after / _KEEPALIVE_PROBES))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for name, value in (
        ("TCP_KEEPIDLE", seconds),
        ("TCP_KEEPINTVL", seconds),
        ("TCP_KEEPCNT", _KEEPALIVE_PROBES - 1),
        ("TCP_USER_TIMEOUT", round(lost_after * 1000)),  # milliseconds that data may stay unacknowledged
    ):
        if hasattr(socket, name):  # only Linux has all of these
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def plain_address(address: str) -> str:
    """Return the address of a peer; an IPv4 address that an IPv6 socket reports is returned in IPv4's form."""
    return address.removeprefix("::ffff:") if "." in address else address
