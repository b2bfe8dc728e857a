"""The program of a device's process: read commands as lines of JSON, measure, and write a line of JSON for each.

    python -m kumi.doctor.device_worker PARENT KIND DEVICE       KIND: cpu or cuda

PARENT is the number of the process with which this one ends. An exception is answered by {"error": ...}. See
`kumi.doctor.device_workers`.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from kumi.accelerator import is_gpu
from kumi.launch.head_messages import decode, encode
from kumi.launch.rank_process import die_with_parent

# The matmul that measures a device: side of its matrices, and dtype.
_SIDE = {"cpu": 512, "cuda": 8192}
_DTYPE = {"cpu": torch.float32, "cuda": torch.bfloat16}
_WARM_UP_SECONDS = 0.3
# Elements of the all-reduce. Element i of rank r is (i + r) % _MODULUS, so that float32 sums of up to 16,000 ranks are
# exact, whatever the order of the summands.
_ELEMENTS, _MODULUS = 2**20, 1000
# After a first transfer between two nodes, which tells the speed, come _TRANSFERS whose sizes are chosen to last
# _TRANSFER_SECONDS each; none begins after _PAIR_SECONDS. The fastest counts.
_TRANSFER_SECONDS, _TRANSFERS, _PAIR_SECONDS = 0.1, 3, 0.6
# The sizes of the first and of the largest transfer.
_FIRST_BYTES, _MOST_BYTES = 2**19, 2**28
_BACKENDS = {"cpu": "gloo", "cuda": "nccl"}

Answer = dict[str, Any]


@dataclass
class Worker:
    """The state of a device's process. `store`: the address book of the process group, served by rank 0."""

    device: torch.device
    store: Any = None

    def synchronize(self) -> None:
        if is_gpu(self.device):
            torch.cuda.synchronize(self.device)


def versions(worker: Worker) -> Answer:
    """Return the versions of the libraries that torch has loaded, and the name of the device."""
    if not is_gpu(worker.device):
        return {"nccl": "", "cuda": "", "name": "cpu"}
    nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return {"nccl": nccl, "cuda": str(torch.version.cuda), "name": torch.cuda.get_device_name(worker.device)}


def speed(worker: Worker, seconds: float) -> Answer:
    """Multiply matrices for about `seconds`. Return FLOP/s, and the share of the time in which a CPU was available.

    The share of a GPU's worker is 1.
    """
    kind = worker.device.type
    side = _SIDE[kind]
    matrix = torch.randn(side, side, device=worker.device).to(_DTYPE[kind])
    product = torch.empty_like(matrix)
    _multiply(worker, matrix, product, _WARM_UP_SECONDS)
    cpu_before = time.process_time()
    calls, elapsed = _multiply(worker, matrix, product, seconds)
    share = (time.process_time() - cpu_before) / elapsed
    return {"rate": 2 * side**3 * calls / elapsed, "cpu_share": share if kind == "cpu" else 1.0}


def _multiply(worker: Worker, matrix: torch.Tensor, product: torch.Tensor, seconds: float) -> tuple[int, float]:
    """Return the number of multiplications in about `seconds`, and the exact seconds."""
    calls, burst, began = 0, 1, time.perf_counter()
    while (elapsed := time.perf_counter() - began) < seconds or not calls:
        for _ in range(burst):
            torch.mm(matrix, matrix, out=product)
        worker.synchronize()
        calls += burst
        burst = 1 if worker.device.type == "cpu" else min(16, burst + 1)
    return calls, elapsed


def serve(worker: Worker, host: str) -> Answer:
    """Open the store of the process group, for rank 0, and return its port."""
    worker.store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=10))
    return {"port": worker.store.port}


def join(worker: Worker, host: str, port: int, rank: int, world: int, seconds: float) -> Answer:
    """Join the process group of all devices of all nodes."""
    timeout = timedelta(seconds=seconds)
    if worker.store is None:
        worker.store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
    backend = _BACKENDS[worker.device.type]
    cuda = is_gpu(worker.device)
    dist.init_process_group(
        backend,
        store=worker.store,
        rank=rank,
        world_size=world,
        timeout=timeout,
        device_id=worker.device if cuda else None,
    )
    return {}


def all_reduce(worker: Worker) -> Answer:
    """All-reduce numbers whose sum is exact, a few times.

    Return the largest number of wrong elements in a sum, the shortest time in seconds, and the bytes of the tensor.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    index = torch.arange(_ELEMENTS, device=worker.device)
    residues = torch.arange(_MODULUS, device=worker.device)
    sums = torch.zeros(_MODULUS, device=worker.device)  # by index % _MODULUS
    for other in range(world):
        sums += (residues + other) % _MODULUS
    expected = sums[index % _MODULUS]
    wrong, times = 0, []
    for _ in range(_TRANSFERS):
        values = ((index + rank) % _MODULUS).to(torch.float32)
        worker.synchronize()
        began = time.perf_counter()
        dist.all_reduce(values)
        worker.synchronize()
        times.append(time.perf_counter() - began)
        wrong = max(wrong, int((values != expected).sum()))
    return {"wrong": wrong, "seconds": min(times), "bytes": 4 * _ELEMENTS}


def transfers(worker: Worker, peers: list[int]) -> Answer:
    """Exchange tensors with each of `peers` (ranks) in turn. Return the bytes/s sent to each, in the same order.

    Nobody waits for ever if the peers of all ranks come from the same rounds, in order, and each round pairs the ranks.
    """
    rates = []
    for peer in peers:
        if dist.get_rank() < peer:
            rates.append(_send_rate(worker, peer))
            _receive_all(worker, peer)
        else:
            _receive_all(worker, peer)
            rates.append(_send_rate(worker, peer))
    return {"rates": rates}


def _send_rate(worker: Worker, peer: int) -> float:
    """Send tensors to `peer`, which is in `_receive_all`, and return the best bytes/s. The size 0 tells it the end."""
    rates: list[float] = []
    size, began = _FIRST_BYTES, time.perf_counter()
    while len(rates) <= _TRANSFERS and time.perf_counter() - began < _PAIR_SECONDS:
        dist.send(torch.tensor([size], device=worker.device), peer)
        tensor = torch.zeros(size // 4, device=worker.device)
        _confirm(worker, peer)
        started = time.perf_counter()
        dist.send(tensor, peer)
        _confirm(worker, peer)
        rates.append(size / (time.perf_counter() - started))
        # The first transfer opens connections, and tells how much fits into the time.
        size = 4 * int(min(max(rates[0] * _TRANSFER_SECONDS, _FIRST_BYTES), _MOST_BYTES) // 4)
    dist.send(torch.tensor([0], device=worker.device), peer)
    return max(rates)


def _receive_all(worker: Worker, peer: int) -> None:
    """Receive the tensors of `_send_rate` from `peer`, and confirm each when it is expected and when it has come."""
    size = torch.zeros(1, dtype=torch.int64, device=worker.device)
    while True:
        dist.recv(size, peer)
        if not int(size):
            return
        tensor = torch.empty(int(size) // 4, device=worker.device)
        dist.send(torch.zeros(1, device=worker.device), peer)
        dist.recv(tensor, peer)
        worker.synchronize()
        dist.send(torch.zeros(1, device=worker.device), peer)


def _confirm(worker: Worker, peer: int) -> None:
    """Wait for the confirmation of `peer`: it is ready to receive, or has received everything."""
    dist.recv(torch.zeros(1, device=worker.device), peer)
    worker.synchronize()


_COMMANDS: dict[str, Callable[..., Answer]] = {
    function.__name__: function for function in (versions, speed, serve, join, all_reduce, transfers)
}


def main() -> None:
    """Answer the commands on standard input until it ends."""
    parent, kind, number = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    die_with_parent(parent)
    answers = os.dup(1)
    os.dup2(2, 1)  # libraries that print must not disturb the answers
    worker = Worker(torch.device("cuda", number) if kind == "cuda" else torch.device("cpu"))
    if kind == "cuda" and number < torch.cuda.device_count():
        torch.cuda.set_device(worker.device)
    for line in sys.stdin:
        command = decode(line.encode())
        try:
            answer = _COMMANDS[command.pop("do")](worker, **command)
        except Exception as error:  # the doctor reports any failure of a device as a finding
            answer = {"error": f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"}
        os.write(answers, encode(answer))
    os._exit(0)  # without tear-down, in which a broken group may hang


if __name__ == "__main__":
    main()
