"""Several processes on 127.0.0.1 as the nodes of a run: each is a fork of the test process that runs `kumi doctor`."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import torch

from forked import run_all_forked, run_forked
from kumi.cli import main
from kumi.doctor import device_worker, device_workers

_CLONE_NEWNS = 0x00020000
RUN = """
name = "fleet"
[model]
init = "random"
[model.config]
architectures = ["LlamaForCausalLM"]
model_type = "llama"
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 1
num_attention_heads = 2
num_key_value_heads = 2
vocab_size = 260
max_position_embeddings = 64
[cluster]
nodes = {nodes}
devices_per_node = 1
[batch]
seq_len = 32
tokens_per_step = {tokens}
[data]
tokenizer = {{vocab_size = 260}}
sources = [{{path = "words.txt"}}]
validation = 0
[train]
steps = 2
out = "{out}"
"""


@dataclass(frozen=True)
class Ended:
    """How `kumi doctor --json` ended on one node: its exit code, standard output and standard error."""

    code: int
    printed: str
    errors: str

    @property
    def result(self) -> dict[str, Any]:
        """The object that it printed."""
        return json.loads(self.printed)

    def finding(self, name: str) -> dict[str, Any]:
        """Return the line of the check `name`."""
        return next(line for line in self.result["findings"] if line["name"] == name)

    def failed(self) -> list[str]:
        """Return the names of the checks that failed."""
        return [line["name"] for line in self.result["findings"] if line["verdict"] == "fail"]


class ForkedWorker:
    """The part of `subprocess.Popen` that a device's process needs. It forks, so that torch is imported already."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], **streams: int) -> None:
        inward, outward = os.pipe(), os.pipe()
        self.pid = os.fork()
        if not self.pid:
            _work(command[3:], env, inward[0], outward[1])
        os.close(inward[0])
        os.close(outward[1])
        self.stdin, self.stdout = open(inward[1], "wb"), open(outward[0], "rb")  # noqa: SIM115
        self._code: int | None = None

    def kill(self) -> None:
        if self._code is None:
            os.kill(self.pid, signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        if self._code is None:
            self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self._code


def _work(words: Sequence[str], env: Mapping[str, str], stdin: int, stdout: int) -> None:
    try:
        for number, end in enumerate((stdin, stdout, os.open(os.devnull, os.O_WRONLY))):
            os.dup2(end, number)
        os.closerange(3, 256)  # ends of other workers' pipes
        os.environ.clear()
        os.environ.update(env)
        sys.argv, sys.stdin = ["device_worker", *words], open(0)  # noqa: SIM115
        torch.set_num_threads(1)
        device_worker.main()
    finally:
        os._exit(1)


def fork_workers() -> None:
    """From now on, this process forks the processes of its devices. For a process that does nothing else."""
    device_workers.subprocess = SimpleNamespace(  # type: ignore[assignment]
        Popen=ForkedWorker, PIPE=-1, DEVNULL=-3, TimeoutExpired=subprocess.TimeoutExpired
    )


def write_run(folder: Path, nodes: int) -> Path:
    """Write a run file for `nodes` nodes of one rank in `folder`."""
    file = folder / "run.toml"
    file.write_text(RUN.format(nodes=nodes, tokens=32 * nodes, out=folder / "out"))
    (folder / "words.txt").write_text("one two three\n" * 50)
    return file


def free_port() -> int:
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]


def examine_nodes(
    folder: Path,
    nodes: int = 2,
    *,
    broken: Mapping[int, Callable[[], object]] = MappingProxyType({}),
    words: Mapping[int, Sequence[str]] = MappingProxyType({}),
    head: str = "127.0.0.1",
    interface: str = "lo",
    wait: float = 60.0,
    own_interpreters: bool = False,
) -> list[Ended]:
    """Run `kumi doctor --nodes` on `nodes` nodes at once. `broken[node]` is called on that node before.

    `words`: further words of the command line, by node. `head`, `interface`: the address of node 0 and the interface
    for GLOO; "" sets none. `own_interpreters`: start the devices' processes as the program does, which takes seconds.
    """
    file, port = write_run(folder, nodes), free_port()

    def node(number: int) -> None:
        for name in [name for name in os.environ if name.startswith(("NCCL_", "GLOO_"))]:
            del os.environ[name]
        os.environ |= {"GLOO_SOCKET_IFNAME": interface} if interface else {}
        os.chdir(folder)
        if not own_interpreters:
            fork_workers()
        broken.get(number, lambda: None)()
        place = ["--node", str(number), "--head", f"{head}:{port}", "--wait", str(wait)]
        raise SystemExit(main(["doctor", str(file), "--nodes", *place, "--json", *words.get(number, [])]))

    ended = run_all_forked([partial(node, number) for number in range(nodes)], timeout=170.0)
    return [Ended(*each) for each in ended]


def own_mounts() -> None:
    """Give this process mounts of its own, which no other process sees. Needs root."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS) != 0:
        raise OSError(ctypes.get_errno(), "unshare(CLONE_NEWNS) failed")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)


def mount_tmpfs(folder: Path | str, options: str) -> None:
    """Mount an empty file system in memory at `folder`, for this process and its children only."""
    own_mounts()
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], check=True)


def bind_read_only(folder: Path) -> None:
    """Make `folder` read-only for this process and its children."""
    own_mounts()
    subprocess.run(["mount", "--bind", str(folder), str(folder)], check=True)
    subprocess.run(["mount", "-o", "remount,ro,bind", str(folder)], check=True)


def may_mount() -> bool:
    """Return True if this process may mount file systems in a namespace of its own."""
    return sys.platform == "linux" and os.geteuid() == 0 and run_forked(own_mounts)[0] == 0


def slow_children(share: float, period: float = 0.1) -> None:
    """Stop the child processes of this process for all but `share` of each `period`, from now on, as cpulimit does."""

    def slow() -> None:
        while True:
            children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
            for signum, seconds in ((signal.SIGSTOP, 1 - share), (signal.SIGCONT, share)):
                for child in children:
                    os.kill(int(child), signum)
                time.sleep(period * seconds)

    threading.Thread(target=slow, daemon=True).start()
