"""Checks of the network's settings: the interface that leads to the head, variables of GLOO and NCCL, open ports."""

from __future__ import annotations

import ipaddress
import os
import selectors
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kumi.doctor.finding import Fleet, Judgement, Reading
from kumi.doctor.fleet_rules import shorten
from kumi.doctor.here import Here
from kumi.launch.standing import interface_to
from kumi.safe_output import is_secret

# Files of Linux: an identifier of the running system, and a link to the network namespace of this process.
_BOOT_ID, _NETWORK = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/net")
_INFINIBAND = Path("/sys/class/infiniband")
_PREFIXES = ("NCCL_", "GLOO_", "TORCH_NCCL_", "TORCH_GLOO_")
# Variables that may differ between machines.
_LOCAL = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_TOPO_FILE", "NCCL_DEBUG_FILE")
_CONNECT_SECONDS = 3.0
# Among at most this many nodes, all pairs connect. Among more, each node connects to those at distances 1, 2, 4, ...
_SMALL_FLEET = 16
_TOPIC = "ports of all nodes"


def interface(here: Here) -> Reading:
    """Return the network interface of this node's messages: the user's, or the one that leads to the head."""
    if not here.several_nodes:
        return Reading(absent="one node")
    host = here.meeting.seat.host
    routed = interface_to(host)
    chosen = here.environ.get("GLOO_SOCKET_IFNAME", "")
    problems = list(_unknown_interfaces(here.environ))
    names = chosen.split(",") if chosen else [routed or ""]
    if "lo" in names and not _is_loopback(host):
        where = f"GLOO_SOCKET_IFNAME={chosen} has" if chosen else f"messages to {host} take"
        problems.append(f"{where} the loopback interface, which no other machine can reach")
    shown = f"{', '.join(filter(None, names)) or 'unknown'} to {host}"
    return Reading({"shown": shown, "loopback": _is_loopback(host), "machine": machine_id()}, problems=tuple(problems))


def reaches_all(readings: Mapping[int, Reading], fleet: Fleet) -> Judgement:
    """The head's name leads to a loopback address only if all nodes are on one machine."""
    limit = "exists, and leads to the head"
    shown = sorted({reading.value["shown"] for reading in readings.values()})
    machines = {reading.value["machine"] for reading in readings.values()}
    local = [node for node, reading in readings.items() if reading.value["loopback"]]
    if local and len(machines) > 1:
        text = "the head's name leads to the loopback interface on " + shorten([fleet.label(node) for node in local])
        return Judgement("fail", text, limit, tuple(local))
    return Judgement("ok", shorten(shown), limit)


def _is_loopback(host: str) -> bool:
    try:
        answers = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return any(ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback for *_, address in answers)


def machine_id() -> str:
    """Return a text that is equal for two processes if they have the same network interfaces.

    They have if they run on one machine, and in the same container or both outside of containers.
    """
    try:
        return f"{_BOOT_ID.read_text().strip()} {os.readlink(_NETWORK)}"
    except OSError:
        return socket.gethostname()


def _unknown_interfaces(environ: Mapping[str, str]) -> Iterator[str]:
    """Yield a sentence for each interface that a variable names and this machine lacks."""
    present = [name for _, name in socket.if_nameindex()]
    listed = f"this machine has {', '.join(present)}"
    for name in filter(None, environ.get("GLOO_SOCKET_IFNAME", "").split(",")):
        if name not in present:
            yield f"GLOO_SOCKET_IFNAME={name} does not exist; {listed}"
    value = environ.get("NCCL_SOCKET_IFNAME", "")
    if value and not value.startswith("^"):
        exact, names = value.startswith("="), value.removeprefix("=").split(",")
        matches = [here for here in present for name in names if here == name or (not exact and here.startswith(name))]
        if not matches:
            yield f"NCCL_SOCKET_IFNAME={value} matches no interface; {listed}"


def network_variables(here: Here) -> Reading:
    """Return the variables of GLOO and NCCL that the user set; those that do not fit this machine are problems."""
    environ = here.environ
    variables = {
        name: "(not shown)" if is_secret(name) else value
        for name, value in sorted(environ.items())
        if name.startswith(_PREFIXES)
    }
    problems: list[str] = []
    warnings: list[str] = []
    if not here.several_nodes:  # with several nodes, `interface` says this
        problems += _unknown_interfaces(environ)
    adapters = os.listdir(_INFINIBAND) if _INFINIBAND.is_dir() else []
    wanted_adapters = environ.get("NCCL_IB_HCA", "")
    if wanted_adapters and not wanted_adapters.startswith("^"):
        names = [name.partition(":")[0] for name in wanted_adapters.lstrip("=").split(",")]
        missing = [name for name in names if not any(adapter.startswith(name) for adapter in adapters)]
        if missing:
            present = ", ".join(sorted(adapters)) or "none"
            problems.append(f"NCCL_IB_HCA names {', '.join(missing)}; the adapters of this machine: {present}")
    if adapters and environ.get("NCCL_IB_DISABLE") == "1":
        warnings.append(f"NCCL_IB_DISABLE=1 leaves the adapters {', '.join(sorted(adapters))} unused")
    if environ.get("NCCL_P2P_DISABLE") == "1" and here.devices.kind == "cuda" and here.devices.per_node > 1:
        warnings.append("NCCL_P2P_DISABLE=1 leaves NVLink and PCIe between GPUs unused")
    return Reading(variables, problems=tuple(problems), warnings=tuple(warnings))


def same_variables(readings: Mapping[int, Reading], fleet: Fleet) -> Judgement:
    """Every variable has the same value on all nodes, but for those that name devices or files of one machine."""
    limit = f"the same on all {fleet.noun}s, and valid"
    names = sorted({name for reading in readings.values() for name in reading.value})
    different = [
        name
        for name in names
        if name not in _LOCAL and len({reading.value.get(name) for reading in readings.values()}) > 1
    ]
    if not different:
        return Judgement("ok", ", ".join(names) or "none set", limit)
    listed = [f"{name}: {_values(name, readings, fleet)}" for name in different]
    return Judgement("fail", shorten(listed), limit, tuple(readings))


def _values(name: str, readings: Mapping[int, Reading], fleet: Fleet) -> str:
    """Return the values of a variable on the nodes, as text."""
    groups: dict[str, list[int]] = {}
    for node, reading in readings.items():
        groups.setdefault(reading.value.get(name, "unset"), []).append(node)
    return ", ".join(f"{value} on {shorten([fleet.label(node) for node in nodes])}" for value, nodes in groups.items())


def open_ports(here: Here) -> Reading:
    """Connect to ports of other nodes, chosen by the system as GLOO's and NCCL's are.

    Return by node the seconds until the connection, or why it failed.
    """
    if not here.several_nodes:
        return Reading(absent="one node")
    meeting = here.meeting
    node, members = meeting.seat.node, meeting.members
    with _listener() as listener:
        address = [_own_address(here), listener.getsockname()[1]]
        addresses = meeting.exchange(_TOPIC, address, seconds=10.0)
        partners = [other for other in partners_of(node, members) if other in addresses]
        results = _connect_all({other: tuple(addresses[other]) for other in partners})
        meeting.exchange("all nodes have connected", None, seconds=_CONNECT_SECONDS + 10.0)  # then ports may close
    return Reading({str(other): result for other, result in results.items()})


def partners_of(node: int, members: list[int]) -> list[int]:
    """Return the nodes to which `node` connects: later ones in a small fleet, else those at distances 1, 2, 4, ..."""
    place = members.index(node)
    if len(members) <= _SMALL_FLEET:
        return members[place + 1 :]
    distances = [2**power for power in range((len(members) - 1).bit_length())]
    return sorted({members[(place + distance) % len(members)] for distance in distances} - {node})


def all_connected(readings: Mapping[int, Reading], fleet: Fleet) -> Judgement:
    """Every pair has connected. If all of several failed pairs have a node in common, only this node is named."""
    limit = "all pairs connect"
    results = {
        (node, int(other)): value for node, reading in readings.items() for other, value in reading.value.items()
    }
    failed = {pair: value for pair, value in results.items() if isinstance(value, str)}
    if not failed:
        slowest = max(results.values(), default=0.0)
        return Judgement("ok", f"{len(results)} pairs, at most {1e3 * slowest:.2f} ms", limit)
    common = set.intersection(*(set(pair) for pair in failed)) if len(failed) > 1 else set()
    listed = [f"{fleet.label(a)} to {fleet.label(b)}: {reason}" for (a, b), reason in failed.items()]
    nodes = tuple(sorted(common)) if common else tuple(sorted({node for pair in failed for node in pair}))
    return Judgement("fail", shorten(listed), limit, nodes)


def _listener() -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, backlog=64, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=64)


def _own_address(here: Here) -> str:
    """Return the address with which this machine reaches the head. A datagram socket sends nothing to find it."""
    host, port = here.meeting.seat.host, here.meeting.seat.port
    family, kind, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def _connect_all(addresses: Mapping[int, tuple[Any, ...]]) -> dict[int, float | str]:
    """Connect to all `addresses` at once; return the seconds until each connection, or the reason of its failure."""
    results: dict[int, float | str] = {}
    with selectors.DefaultSelector() as selector:
        for node, (host, port) in addresses.items():
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            connection = socket.socket(family, socket.SOCK_STREAM)
            connection.setblocking(False)
            began = time.monotonic()
            code = connection.connect_ex((host, port))
            if code not in (0, 115, 36):  # EINPROGRESS on Linux, and on macOS
                results[node] = os.strerror(code)
                connection.close()
            else:
                selector.register(connection, selectors.EVENT_WRITE, (node, began))
        until = time.monotonic() + _CONNECT_SECONDS
        while selector.get_map() and (left := until - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                node, began = key.data
                assert isinstance(key.fileobj, socket.socket)
                code = key.fileobj.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                results[node] = os.strerror(code) if code else time.monotonic() - began
                selector.unregister(key.fileobj)
                key.fileobj.close()
        for key in list(selector.get_map().values()):
            results[key.data[0]] = f"no answer within {_CONNECT_SECONDS:.0f} s"
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
    return dict(sorted(results.items()))
