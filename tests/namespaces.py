"""Two machines, as two network namespaces joined by a virtual cable."""

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
                _ip("netns", "add", name)
                stack.callback(_remove, name)
            _ip("link", "add", "veth0", "netns", names[0], "type", "veth", "peer", "name", "veth0", "netns", names[1])
            for name, address in zip(names, addresses):
                words = (
                    [f"{address}/64", "dev", "veth0", "nodad"] if ":" in address else [f"{address}/24", "dev", "veth0"]
                )
                _ip("-n", name, "addr", "add", *words)
                _ip("-n", name, "link", "set", "veth0", "up")
                _ip("-n", name, "link", "set", "lo", "up")
        except OSError as error:
            pytest.skip(f"network namespaces are not allowed here: {error}")
        yield names


def enter_namespace(name: str) -> None:
    """Move this process into the network namespace `name`."""
    with open(f"/run/netns/{name}") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")


def cut_cable(name: str) -> None:
    """Let the cable of the namespace `name` drop everything: neither side hears that the other is gone."""
    _ip("-n", name, "link", "set", "veth0", "down")


def _ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def _remove(name: str) -> None:
    """End the processes in the namespace, which may have lost their agent, and delete it."""
    for pid in _ip("netns", "pids", name).split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    _ip("netns", "del", name)
