"""Start one process per device of this node, and give all of them the same commands.

The processes of `kumi.doctor.device_worker` import torch and use the devices, so that this process need not: a launcher
that forks its ranks later must have no CUDA and no threads.
"""

from __future__ import annotations

import os
import selectors
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from kumi.launch.head_messages import decode, encode

Reply = Mapping[str, Any]
# A worker whose output broke off has this long to end, so that its exit code can be reported.
_END_SECONDS = 2.0


class DeviceWorkers:
    """The processes of this node's devices, by number of the device."""

    def __init__(self, processes: Mapping[int, subprocess.Popen[bytes]]) -> None:
        self.processes = processes

    def ask(
        self, command: str, seconds: float, each: Mapping[int, Mapping[str, Any]] | None = None
    ) -> dict[int, Reply]:
        """Send `command` to all workers and return their replies by device, after at most `seconds`.

        `each`: arguments of the command for single workers, by device.
        The reply of a worker that failed, died or was late is {"error": reason}.
        """
        self.send(command, each)
        return self.receive(seconds)

    def ask_one(self, device: int, command: str, values: Mapping[str, Any], seconds: float) -> dict[int, Reply]:
        """Send `command` with the arguments `values` to the worker of `device` alone; otherwise as `ask`."""
        return DeviceWorkers({device: self.processes[device]}).ask(command, seconds, {device: values})

    def send(self, command: str, each: Mapping[int, Mapping[str, Any]] | None = None) -> None:
        """Send `command` to all workers, without waiting for the replies."""
        for device, process in self.processes.items():
            line = encode({"do": command, **(each or {}).get(device, {})})
            with suppress(OSError):  # it died, which `receive` reports
                _pipe(process.stdin).write(line)
                _pipe(process.stdin).flush()

    def receive(self, seconds: float) -> dict[int, Reply]:
        """Return one reply of each worker, by device; see `ask`. A worker that is late is killed."""
        until, buffers = time.monotonic() + seconds, dict.fromkeys(self.processes, b"")
        replies: dict[int, Reply] = {}
        with selectors.DefaultSelector() as selector:
            for device, process in self.processes.items():
                selector.register(_pipe(process.stdout), selectors.EVENT_READ, device)
            while selector.get_map() and (left := until - time.monotonic()) > 0:
                for key, _ in selector.select(left):
                    device = key.data
                    data = os.read(key.fd, 2**16)
                    buffers[device] += data
                    if not data or buffers[device].endswith(b"\n"):
                        selector.unregister(key.fileobj)
                        replies[device] = _parse(buffers[device], self.processes[device])
        for device, process in self.processes.items():
            if device not in replies:
                process.kill()
                replies[device] = {"error": f"no answer within {seconds:.0f} s"}
        return dict(sorted(replies.items()))

    def close(self) -> None:
        """End the workers."""
        for process in self.processes.values():
            with suppress(OSError):
                _pipe(process.stdin).close()
            process.kill()
            _pipe(process.stdout).close()
            process.wait()


@contextmanager
def device_workers(kind: str, devices: Sequence[int], environ: Mapping[str, str]) -> Iterator[DeviceWorkers]:
    """Start the workers of `devices` for the duration of the block. `kind`: cpu or cuda; `environ`: their variables."""
    command = [sys.executable, "-m", "kumi.doctor.device_worker", str(os.getpid()), kind]
    root = str(Path(__file__).parents[2])  # the workers import this kumi, whatever the current folder is
    variables = {**environ, "PYTHONPATH": os.pathsep.join([root, *filter(None, [environ.get("PYTHONPATH")])])}
    processes: dict[int, subprocess.Popen[bytes]] = {}
    workers = DeviceWorkers(processes)
    try:
        for device in devices:
            processes[device] = subprocess.Popen(
                [*command, str(device)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=variables,
            )
        yield workers
    finally:
        workers.close()


def first_error(replies: Mapping[int, Reply]) -> str:
    """Return the first error among `replies`, with the number of its device; "" if there is none."""
    return next((f"device {device}: {reply['error']}" for device, reply in replies.items() if "error" in reply), "")


def _parse(line: bytes, process: subprocess.Popen[bytes]) -> Reply:
    try:
        return decode(line)
    except ValueError:
        try:
            code = process.wait(timeout=_END_SECONDS)
        except subprocess.TimeoutExpired:
            return {"error": "the process of the device sent no answer but other output"}
        return {"error": f"the process of the device ended with code {code}"}


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None, "the workers' input and output are pipes"
    return pipe
