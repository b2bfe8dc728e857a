"""A rank that fails, alone, with another and under torchrun's agent: exit code, reason, no lost step, no leftovers.

Each case runs the command in a forked child whose trainer has the fault built in, then runs it again without.
"""

import contextlib
import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from tests.train.conftest import losses, run_file

from kumi.cli import main
from kumi.errors import DataError
from kumi.storage import checkpoint
from kumi.train import loop

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="signals and states as Linux has them")

FAULTY_STEP = 4  # there is a checkpoint of step 2 by then
TIMEOUT_S = 5.0
DEADLINE = 90.0
WORDS = {
    "forward": "ValueError: made to fail",
    "data": "DataError: a record cannot be read",
    "save": "No space left on device",
    "disk": "No space left on device",
    "memory": "DeviceMemoryError: this machine ran out of memory",
    "kill": r"killed by signal 9 (SIGKILL)",
    "stop": "did not join a collective in which rank 0 waited",
}
CODES = {"forward": 1, "data": 3, "save": 8, "disk": 8, "memory": 5, "kill": 7, "stop": 7}


# Faults, built into a child


def build_in(fault, folder):
    """Have the last rank of this process's trainer fail in step FAULTY_STEP, or in its save.

    No rank of a failing run may destroy its process groups: NCCL would wait there for the messages of the others.
    """
    torch.distributed.destroy_process_group = lambda *args: time.sleep(10 * DEADLINE)
    if fault == "save":
        write = checkpoint.write_pieces

        def write_pieces(target, rank, *args, **kwargs):
            if target.name == f"step_{FAULTY_STEP:06d}.tmp" and rank == last_rank():
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))
            return write(target, rank, *args, **kwargs)

        checkpoint.write_pieces = write_pieces
        return
    read, train = loop.read_step, loop.train_step

    def read_step(parts, state, stop):
        if fault == "data" and due(parts, state):
            raise DataError("a record cannot be read")
        return read(parts, state, stop)

    def train_step(parts, state, *args):
        if due(parts, state):
            fail(fault, folder)
        return train(parts, state, *args)

    def due(parts, state):
        return state.step + 1 == FAULTY_STEP and parts.mesh.rank == last_rank()

    loop.read_step, loop.train_step = read_step, train_step


def last_rank():
    return int(os.environ.get("WORLD_SIZE", "1")) - 1


def fail(fault, folder):
    if fault == "forward":
        raise ValueError("made to fail")
    if fault == "memory":
        torch.empty(2**50)
    if fault in ("kill", "stop"):
        (folder / "pid").write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
    if fault == "disk":
        with open(folder / "run" / "filler", "wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))


# The command, in a child


def command(folder, fault, way, output):
    """The process id of a child that runs `kumi train` with `fault` built in; it prints to `output`."""
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
    child = os.fork()
    if child:
        os.close(descriptor)
        return child
    code = 99
    try:
        os.setsid()
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115  until the child ends
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        (folder / "tmp").mkdir(exist_ok=True)
        os.environ["TMPDIR"] = tempfile.tempdir = str(folder / "tmp")
        os.chdir(folder)
        if fault is not None:
            build_in(fault, folder)
        code = under_agent(folder) if way == "torchrun" else said_and_ended()
    finally:
        sys.stdout.flush()
        os._exit(code)


def said_and_ended():
    """The exit code of the command, after the traceback of an exception, as the interpreter shows it."""
    try:
        return main(["train", "run.toml"])
    except Exception:
        sys.excepthook(*sys.exc_info())
        return 1


def agent_rank(folder):
    """One rank under the agent. None talks to the store of the agent before the last is forked."""
    (folder / "tmp" / f"forked{os.environ['RANK']}").touch()
    while not (folder / "tmp" / f"forked{last_rank()}").exists():
        time.sleep(0.01)
    sys.exit(said_and_ended())  # as the command does, so that exit handlers run


def under_agent(folder, run_rank=agent_rank, nodes=1, node=0, head=None):
    """Run the command under torchrun's agent, with its report and its exit code.

    `head` is the address and port of node 0.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    if head is None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            head = f"127.0.0.1:{listener.getsockname()[1]}"
    config = LaunchConfig(
        min_nodes=nodes,
        max_nodes=nodes,
        nproc_per_node=2 // nodes,
        run_id="test",
        rdzv_backend="static",
        start_method="fork",
        rdzv_endpoint=head,
        rdzv_configs={"rank": node},
        max_restarts=0,
        monitor_interval=0.1,
        local_addr="127.0.0.1" if nodes == 1 else None,
        logs_specs=DefaultLogsSpecs(log_dir=str(folder / f"agent{node}")),
    )
    try:
        elastic_launch(config, run_rank)(folder)
    except ChildFailedError as error:
        print(error)
        return 1
    return 0


def ended(child, output, fault, folder):
    """The exit code of `child`. A stopped rank goes on once the reason is on the screen: agents end it slowly."""
    until = time.monotonic() + DEADLINE
    released = fault != "stop"
    try:
        while True:
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            if not released and WORDS["stop"] in output.read_text():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int((folder / "pid").read_text()), signal.SIGCONT)
                released = True
            assert time.monotonic() < until, output.read_text()
            time.sleep(0.02)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)


def exact_code(report):
    """The exit code of the rank that failed first, in torchrun's report."""
    return int(report.partition("Root Cause")[2].partition("exitcode  : ")[2].split()[0])


def shared_memory():
    return set(os.listdir("/dev/shm")) if Path("/dev/shm").is_dir() else set()


CASES = [(fault, way) for fault in CODES for way in ("one", "two", "torchrun") if (fault, way) != ("stop", "one")]
# One of each fault and two or more of each way; test_local.py and test_kill.py have more of two ranks.
USUAL = {("memory", "one"), ("save", "two"), ("forward", "torchrun"), ("stop", "torchrun")}


@pytest.mark.parametrize(
    ("fault", "way"), [case if case in USUAL else pytest.param(*case, marks=pytest.mark.exhaustive) for case in CASES]
)
def test_a_rank_that_fails(small, tmp_path, fault, way):
    folder, output = small.copy(tmp_path), tmp_path / "output.txt"
    shutil.rmtree(folder / "run")
    (folder / "run").mkdir()
    run = partial(
        run_file,
        folder,
        cluster={"devices_per_node": 1 if way == "one" else 2},
        checkpoint={"every": 2, "keep": 9, "asynchronous": fault == "save"},
    )
    run(train__timeout_s=TIMEOUT_S if fault == "stop" else DEADLINE)
    before = shared_memory()
    with small_disk(folder / "run") if fault == "disk" else contextlib.nullcontext():
        code = ended(command(folder, fault, way, output), output, fault, folder)
        text = output.read_text()
        if (fault, way) == ("kill", "one"):
            assert code == -signal.SIGKILL
        elif way == "torchrun":
            assert code == 1
            assert exact_code(text) == (-signal.SIGKILL if fault == "kill" else CODES[fault]), text
            assert ("Signal 9 (SIGKILL)" if fault == "kill" else WORDS[fault]) in text.partition("Root Cause")[2]
            first = (
                json.loads(next((folder / "agent0").rglob("1/error.json")).read_text()) if fault == "forward" else {}
            )
            assert not first or WORDS[fault] in first["message"]["message"]
        else:
            assert code == CODES[fault], text
            assert WORDS[fault] in text
        left = [
            path.name for path in (folder / "tmp").iterdir() if not path.name.startswith(("forked", "torchinductor"))
        ]
        assert left == []
        until = time.monotonic() + 20  # semaphores of tests beside this one come and go
        while shared_memory() - before and time.monotonic() < until:
            time.sleep(0.1)
        assert shared_memory() - before == set()
        (folder / "run" / "filler").unlink(missing_ok=True)
        run(train__timeout_s=DEADLINE)
        assert ended(command(folder, None, way, output), output, None, folder) == 0, output.read_text()
        assert "resumed after step 2" in output.read_text()
        assert not list((folder / "run").rglob(".launch-*"))
        assert losses(folder / "run") == pytest.approx(losses(small.folder / "run"), rel=1e-5)


@contextlib.contextmanager
def small_disk(folder):
    """`folder` as a disk of eight megabytes, more than the run needs and little enough to be filled."""
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(folder)], capture_output=True, text=True
    )
    if made.returncode:
        pytest.skip(f"this system does not allow a small disk: {made.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
