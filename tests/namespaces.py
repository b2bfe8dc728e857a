"""Machines as network namespaces: two that are joined by a virtual cable, or several at a virtual switch."""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence

import pytest

_CLONE_NEWNET = 0x40000000


@contextlib.contextmanager
def two_namespaces(addresses: Sequence[str]) -> Iterator[list[str]]:
    """Yield the names of two namespaces whose interfaces veth0 have `addresses`, IPv4 or IPv6. Skip the test where the
    system does not allow them."""
    if sys.platform != "linux" or os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need Linux, root and iproute2")
    names = [f"kumi-{os.getpid()}-{number}" for number in range(2)]
    with contextlib.ExitStack() as stack:
        try:
            for name in names:
                ip("netns", "add", name)
                stack.callback(_remove, name)
            ip("link", "add", "veth0", "netns", names[0], "type", "veth", "peer", "name", "veth0", "netns", names[1])
            for name, address in zip(names, addresses):
                words = (
                    [f"{address}/64", "dev", "veth0", "nodad"] if ":" in address else [f"{address}/24", "dev", "veth0"]
                )
                ip("-n", name, "addr", "add", *words)
                ip("-n", name, "link", "set", "veth0", "up")
                ip("-n", name, "link", "set", "lo", "up")
        except OSError as error:
            pytest.skip(f"network namespaces are not allowed here: {error}")
        yield names


@contextlib.contextmanager
def switched_namespaces(addresses: Sequence[str]) -> Iterator[list[str]]:
    """Yield the names of namespaces whose interfaces net0 have the IPv4 `addresses`, joined by a switch, which is a
    bridge in a further namespace. Skip the test where the system does not allow them."""
    if sys.platform != "linux" or os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need Linux, root and iproute2")
    names = [f"kumi-switched-{os.getpid()}-{number}" for number in range(len(addresses))]
    switch = f"kumi-switch-{os.getpid()}"
    with contextlib.ExitStack() as stack:
        try:
            for name in (switch, *names):
                ip("netns", "add", name)
                stack.callback(_remove, name)
                ip("-n", name, "link", "set", "lo", "up")
            ip("-n", switch, "link", "add", "bridge0", "type", "bridge")
            ip("-n", switch, "link", "set", "bridge0", "up")
            for number, (name, address) in enumerate(zip(names, addresses)):
                port = f"port{number}"
                ip("link", "add", "net0", "netns", name, "type", "veth", "peer", "name", port, "netns", switch)
                ip("-n", switch, "link", "set", port, "master", "bridge0", "up")
                ip("-n", name, "addr", "add", f"{address}/24", "dev", "net0")
                ip("-n", name, "link", "set", "net0", "up")
        except OSError as error:
            pytest.skip(f"network namespaces are not allowed here: {error}")
        yield names


def enter_namespace(name: str) -> None:
    """Move this thread, of a new process the only one, into the network namespace `name`."""
    with open(f"/run/netns/{name}") as file:
        _join(file.fileno())


@contextlib.contextmanager
def inside_namespace(name: str) -> Iterator[None]:
    """Have this thread in the network namespace `name` for the duration of the block: sockets that it opens stay."""
    with open("/proc/thread-self/ns/net") as before:
        enter_namespace(name)
        try:
            yield
        finally:
            _join(before.fileno())


def cut_cable(name: str) -> None:
    """Let the cable of the namespace `name` drop everything: neither side hears that the other is gone."""
    ip("-n", name, "link", "set", "veth0", "down")


def ip(*words: str) -> str:
    """Run the program `ip` and return its output. Raise OSError if it fails."""
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def _join(namespace: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(namespace, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


def _remove(name: str) -> None:
    """End the processes in the namespace, which may have lost their agent, and delete it."""
    for pid in ip("netns", "pids", name).split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    ip("netns", "del", name)
