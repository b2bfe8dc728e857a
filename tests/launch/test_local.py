"""Ranks of this machine: they meet, they stop when asked, and however one fails there is one error and no orphan."""

import contextlib
import ctypes
import errno
import io
import os
import pty
import resource
import signal
import subprocess
import sys
import tempfile
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from kumi.config.local_machine import threads_per_rank
from kumi.errors import (
    CommunicationError,
    ConfigError,
    DeviceMemoryError,
    KumiError,
    LayoutError,
    RefusedError,
    SaveError,
)
from kumi.launch import local, signals
from kumi.parallel import init_distributed
from kumi.spec.layout import Layout
from kumi.train import loop

DEADLINE = 30.0


class DataPathError(ConfigError):
    """Like an error that a package other than kumi.errors defines."""


# Programs of ranks


def meet():
    dist.init_process_group("gloo")
    total = torch.tensor([dist.get_rank() + 1])
    dist.all_reduce(total)
    size = dist.get_world_size()
    assert total == size * (size + 1) // 2
    dist.destroy_process_group()


def meet_and_tell(folder):
    meet()
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME")
    text = " ".join(os.environ[name] for name in names) + f" {torch.get_num_threads()}"
    (folder / os.environ["RANK"]).write_text(text)
    print("said by", os.environ["RANK"])
    os.system("echo and by a child")


def give_back(code):
    return code


def fail(error):
    """Fail in rank 1 once all have connected: gloo itself prints a line where a peer goes before that."""
    dist.init_process_group("gloo")
    dist.barrier()
    if dist.get_rank() == 1:
        raise error
    dist.barrier()


def fail_late(error):
    """The peer hears of the failure before it is reported."""
    dist.init_process_group("gloo")
    dist.barrier()
    if dist.get_rank() == 1:
        try:
            raise error
        finally:
            dist.destroy_process_group()
            time.sleep(0.3)
    dist.barrier()


def disagree():
    """Rank 1 is sent more than it expects, and gloo aborts it."""
    dist.init_process_group("gloo")
    dist.all_reduce(torch.zeros(4 if dist.get_rank() else 1024))
    dist.barrier()


def die(how):
    """Rank 1 dies, rank 0 gets an error; rank 2 is busy and gets none."""
    dist.init_process_group("gloo")
    pair = dist.new_group([0, 1])
    if dist.get_rank() == 1:
        time.sleep(0.2)
        how()
    if dist.get_rank() == 2:
        time.sleep(60)
    dist.barrier(pair)


def segfault():
    ctypes.string_at(0)


def kill_self():
    os.kill(os.getpid(), signal.SIGKILL)


def leave():
    os._exit(0)


def leave_with_3():
    os._exit(3)


def fail_where_leaving_hangs(run):
    """As on NCCL, where destroying the group waits for messages that the other ranks never send."""

    def steps(run, store, mesh, *_):
        if mesh.rank == 1:
            raise LayoutError("the reason")
        dist.barrier()

    dist.destroy_process_group = lambda: time.sleep(60)
    loop._train = steps
    loop.train_rank(run, None)


def stop_one(timeout_s):
    """Rank 1 is stopped while rank 0 waits for it."""
    place = init_distributed(timeout_s=timeout_s)
    dist.barrier()
    if place.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.barrier()


def fail_on_a_full_disk(folder):
    """Rank 1 fills the disk on which its log and its report lie, then fails."""
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        with open(folder / "filler", "wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))
        raise SaveError("the disk is full")
    dist.barrier()


def train(folder):
    """Steps until the ranks agree that one of them was asked to stop; then 'saves'."""
    dist.init_process_group("gloo")
    flag = signals.install()
    (folder / f"pid{dist.get_rank()}").write_text(str(os.getpid()))
    while True:
        asked = torch.tensor([flag.requested or 0])
        dist.all_reduce(asked, op=dist.ReduceOp.MAX)
        if asked:
            (folder / f"saved{dist.get_rank()}").write_text("")
            dist.destroy_process_group()
            return signals.exit_code(int(asked))
        time.sleep(0.02)


def never_stop(folder):
    (folder / f"pid{os.environ['RANK']}").write_text(str(os.getpid()))
    while True:
        time.sleep(0.02)


def tell_terminal(folder):
    (folder / os.environ["RANK"]).write_text(f"{os.isatty(1)} {os.isatty(2)}")


# Parents in processes of their own


def launch(tmp_path, fn, *args, nproc=2, grace=600.0):
    """The process id of a child that runs the ranks, as the command line does, in a session of its own."""
    child = os.fork()
    if child:
        return child
    os.setsid()
    tempfile.tempdir = str(tmp_path)
    output = os.open(tmp_path / "output", os.O_WRONLY | os.O_CREAT, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    code = 99
    try:
        code = local.run_ranks(fn, args, nproc=nproc, log_dir=tmp_path / "logs", grace=grace)
    except KumiError as error:
        os.write(2, f"{type(error).__name__}: {error}".encode())
        code = error.exit_code
    finally:
        os._exit(code)


def until(condition):
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.01)


def pids(folder, nproc=2):
    """The process ids of the ranks, once all have started."""
    paths = [folder / f"pid{rank}" for rank in range(nproc)]
    until(lambda: all(path.exists() and path.read_text() for path in paths))
    return [int(path.read_text()) for path in paths]


def exit_code(child):
    """The exit code of `child`, which has to end soon."""
    status = [0, 0]

    def ended():
        status[:] = os.waitpid(child, os.WNOHANG)
        return status[0] == child

    until(ended)
    return os.waitstatus_to_exitcode(status[1])


def exists(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


# Tests


def test_one_rank_runs_in_this_process(tmp_path):
    assert local.run_ranks(lambda: os.getpid() % 100 + 1, nproc=1, log_dir=tmp_path) == os.getpid() % 100 + 1
    assert local.run_ranks(give_back, (None,), nproc=1, log_dir=tmp_path) == 0
    with pytest.raises(LayoutError, match="as it is"):
        local.run_ranks(lambda: fail_here(LayoutError("as it is")), nproc=1, log_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []


def fail_here(error):
    raise error


def test_a_rank_that_torchrun_started_runs_in_this_process(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    assert local.run_ranks(lambda: os.getpid() % 100 + 1, nproc=4, log_dir=tmp_path) == os.getpid() % 100 + 1


def test_ranks_meet_and_log(tmp_path, monkeypatch, capfd):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    before = dict(os.environ)
    handlers = [signal.getsignal(signum) for signum in signal.valid_signals()]
    assert local.run_ranks(meet_and_tell, (tmp_path,), nproc=3, log_dir=tmp_path / "logs") == 0
    threads = threads_per_rank(3, {})
    for rank in range(3):
        assert (tmp_path / str(rank)).read_text() == f"{rank} {rank} 3 {threads} lo {threads}"
        logged = f"said by {rank}\nand by a child\n"
        assert (tmp_path / "logs" / f"rank_{rank:05d}.log").read_text() == ("" if rank == 0 else logged)
    assert capfd.readouterr() == ("said by 0\nand by a child\n", "")
    assert dict(os.environ) == before
    assert [signal.getsignal(signum) for signum in signal.valid_signals()] == handlers


def test_the_users_threads_count(monkeypatch):
    assert threads_per_rank(8, {"OMP_NUM_THREADS": "5"}) == 5
    assert threads_per_rank(10**6, {"OMP_NUM_THREADS": "0"}) == 1
    assert threads_per_rank(10**6, {}) == 1
    assert local.rank_environment(
        2, {"OMP_NUM_THREADS": "5", "OMP_WAIT_POLICY": "ACTIVE", "GLOO_SOCKET_IFNAME": "eth0"}
    ) == {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert "OMP_NUM_THREADS" not in local.rank_environment(1, {})


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_the_users_allocator_stays(name):
    assert "PYTORCH_ALLOC_CONF" not in local.rank_environment(1, {name: "max_split_size_mb:128"})


def test_the_interface_of_ranks_that_others_started_leads_to_rank_0(monkeypatch):
    """Loopback joins the ranks of one machine only; it is also where many a machine's own name leads."""
    routes = {"10.0.0.1": "eth1", "head": "lo"}
    monkeypatch.setattr(local, "interface_to", routes.get)
    monkeypatch.setattr(local, "outward_interface", lambda: "eth0")

    def chosen(host, nproc, **more):
        environ = {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": host, "MASTER_PORT": "1", **more}
        return local.rank_environment(nproc, environ).get("GLOO_SOCKET_IFNAME")

    assert chosen("10.0.0.1", 2) == "eth1"
    assert chosen("head", 4) == "lo"
    assert chosen("head", 2) == "eth0"
    assert chosen("nowhere", 2) is None
    assert chosen("10.0.0.1", 2, GLOO_SOCKET_IFNAME="ib0") is None, "what the user has set stays"
    assert local.rank_environment(2, {})["GLOO_SOCKET_IFNAME"] == "lo"
    assert local.rank_environment(2, {"RANK": "0", "WORLD_SIZE": "1"}).get("GLOO_SOCKET_IFNAME") is None


def test_nccl_uses_the_interface_of_gloo(monkeypatch):
    """NCCL takes a name as a prefix unless "=" stands before it, and the first address of an interface."""
    monkeypatch.setattr(local, "interface_to", {"10.0.0.1": "eth1", "fd00::1": "eth1"}.get)

    def chosen(host, **more):
        environ = {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": host, "MASTER_PORT": "1", **more}
        variables = local.rank_environment(2, environ)
        return {name: value for name, value in variables.items() if name.startswith("NCCL_SOCKET")}

    assert chosen("10.0.0.1") == {"NCCL_SOCKET_IFNAME": "=eth1"}
    assert chosen("fd00::1") == {"NCCL_SOCKET_IFNAME": "=eth1", "NCCL_SOCKET_FAMILY": "AF_INET6"}
    assert chosen("fd00::1", NCCL_SOCKET_FAMILY="AF_INET") == {"NCCL_SOCKET_IFNAME": "=eth1"}
    assert chosen("10.0.0.1", NCCL_SOCKET_IFNAME="ib0") == {}, "what the user has set stays"
    assert chosen("10.0.0.1", GLOO_SOCKET_IFNAME="ib0") == {}, "the user chooses interfaces"
    assert local.rank_environment(2, {})["NCCL_SOCKET_IFNAME"] == "=lo"


def test_the_ranks_of_a_node_use_the_interface_to_the_other_nodes():
    link = SimpleNamespace(standing=SimpleNamespace(nodes=2), interface="eth10", address="fd00::2")
    variables = local._environment(2, {"OMP_NUM_THREADS": "1"}, link)
    assert variables["GLOO_SOCKET_IFNAME"] == "eth10"
    assert variables["NCCL_SOCKET_IFNAME"] == "=eth10"
    assert variables["NCCL_SOCKET_FAMILY"] == "AF_INET6"
    assert "NCCL_SOCKET_IFNAME" not in local._environment(2, {"NCCL_SOCKET_IFNAME": "ib"}, link)


@pytest.mark.parametrize("code", [0, 75, 130, 143])
def test_the_ranks_exit_code_comes_back(tmp_path, code):
    assert local.run_ranks(give_back, (code,), nproc=2, log_dir=tmp_path) == code


def test_ranks_of_a_parent_that_uses_cuda_are_spawned(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    monkeypatch.setenv("PYTHONPATH", os.path.dirname(__file__))
    assert local.run_ranks(give_back, (75,), nproc=2, log_dir=tmp_path) == 75


@pytest.mark.parametrize("how", [fail, fail_late])
def test_the_first_ranks_sentence_is_the_error(tmp_path, capfd, how):
    with pytest.raises(LayoutError, match=r"^tp=6 does not divide 8$") as caught:
        local.run_ranks(how, (LayoutError("tp=6 does not divide 8"),), nproc=3, log_dir=tmp_path)
    assert caught.value.exit_code == 2
    assert capfd.readouterr() == ("", "")


def test_an_error_of_another_package_keeps_its_exit_code(tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        local.run_ranks(fail, (DataPathError("no such file"),), nproc=2, log_dir=tmp_path)


def test_an_unexpected_error_is_shown_once_with_its_log(tmp_path, capfd):
    with pytest.raises(
        KumiError, match=r"rank 1 failed unexpectedly; the full traceback is in .*rank_00001.log"
    ) as caught:
        local.run_ranks(fail, (ZeroDivisionError("one by zero"),), nproc=3, log_dir=tmp_path)
    assert caught.value.exit_code == 1
    assert str(caught.value).count("Traceback") == 1
    assert str(caught.value).endswith("ZeroDivisionError: one by zero")
    assert capfd.readouterr() == ("", "")
    for rank in range(3):
        assert "Traceback" in (tmp_path / f"rank_{rank:05d}.log").read_text()


def test_a_rank_that_fails_does_not_wait_to_leave_its_group(tmp_path):
    device, train = SimpleNamespace(kind="cpu", is_gpu=False), SimpleNamespace(timeout_s=60.0)
    run = SimpleNamespace(
        cluster=SimpleNamespace(device=device),
        config=SimpleNamespace(train=train, rollout=None),
        model=SimpleNamespace(layers=()),
        reference_folder=None,
        layout=Layout(dp_replicate=2),
        digest="0" * 32,
    )
    began = time.monotonic()
    with pytest.raises(LayoutError, match=r"^the reason$"):
        local.run_ranks(fail_where_leaving_hangs, (run,), nproc=2, log_dir=tmp_path)
    assert time.monotonic() - began < 30


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell the state of a process")
def test_a_stopped_rank_is_named(tmp_path):
    with pytest.raises(CommunicationError, match=r"^rank 1 \(stopped by a signal\) did not join .* rank 0 waited"):
        local.run_ranks(stop_one, (4.0,), nproc=2, log_dir=tmp_path)


@pytest.mark.skipif(os.geteuid() != 0 or sys.platform != "linux", reason="only root may mount a small disk")
def test_the_reason_is_heard_on_a_full_disk(tmp_path):
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(tmp_path)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"this system does not allow a small disk: {mounted.stderr.decode().strip()}")
    try:
        with pytest.raises(SaveError, match=r"^the disk is full$"):
            local.run_ranks(fail_on_a_full_disk, (tmp_path,), nproc=2, log_dir=tmp_path / "logs")
    finally:
        subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


def test_memory_that_ran_out_is_told_from_another_kill(tmp_path, monkeypatch):
    kills = iter([3, 4])
    monkeypatch.setattr(local, "oom_kills", lambda: next(kills))
    with pytest.raises(
        DeviceMemoryError, match="rank 1 was killed by the kernel because this machine ran out of memory"
    ):
        local.run_ranks(die, (kill_self,), nproc=3, log_dir=tmp_path)


def test_no_room_for_semaphores_names_the_folder(tmp_path, monkeypatch):
    from torch.distributed.launcher import api

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(api.elastic_launch, "__call__", full)
    with pytest.raises(RefusedError, match=r"^/dev/shm: no space is left"):
        local.run_ranks(give_back, (0,), nproc=2, log_dir=tmp_path)


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        (kill_self, r"rank 1 was killed by signal 9 \(SIGKILL\); the kernel kills processes when memory runs out"),
        (segfault, r"rank 1 was killed by signal 11 \(SIGSEGV\); see .*rank_00001.log"),
        (os.abort, r"rank 1 was killed by signal 6 \(SIGABRT\)"),
        (leave, "rank 1 ended with exit code 0 without reporting a cause"),
        (leave_with_3, "rank 1 ended with exit code 3 without reporting a cause"),
    ],
)
def test_a_dead_rank_stops_the_others(tmp_path, capfd, monkeypatch, how, sentence):
    monkeypatch.setattr("kumi.launch.watch._SETTLE_SECONDS", 0.5)
    began = time.monotonic()
    with pytest.raises(CommunicationError, match=sentence) as caught:
        local.run_ranks(die, (how,), nproc=3, log_dir=tmp_path)
    assert caught.value.exit_code == 7
    assert time.monotonic() - began < 25, "the rank that slept was not stopped"
    assert capfd.readouterr() == ("", "")
    if how is segfault:
        assert "in segfault" in (tmp_path / "rank_00001.log").read_text()


def test_ranks_start_beside_a_thousand_open_files(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2048:
        pytest.skip(f"this system allows {hard} open files only")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        with pytest.raises(KumiError, match="rank 1 was killed by"):
            local.run_ranks(die, (kill_self,), nproc=2, log_dir=tmp_path)
    finally:
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_words_of_an_aborted_rank_are_shown(tmp_path):
    with pytest.raises(CommunicationError, match=r"rank 1 .* \(SIGABRT\); .*Received data size doesn't match .*; see "):
        local.run_ranks(disagree, nproc=2, log_dir=tmp_path)


def test_ranks_that_all_leave_without_a_word_do_not_hang_the_parent(tmp_path, monkeypatch):
    monkeypatch.setattr("kumi.launch.watch._SETTLE_SECONDS", 0.5)
    with pytest.raises(CommunicationError, match="ended with exit code 0 without reporting a cause"):
        local.run_ranks(leave, nproc=2, log_dir=tmp_path)


@pytest.mark.parametrize(
    ("who", "signum", "code"),
    [
        ("group", signal.SIGINT, 130),
        ("parent", signal.SIGTERM, 143),
        ("rank", signal.SIGTERM, 143),
        ("parent", signal.SIGUSR1, 75),
    ],
)
def test_a_signal_lets_all_ranks_save(tmp_path, who, signum, code):
    child = launch(tmp_path, train, tmp_path)
    ranks = pids(tmp_path)
    if who == "group":
        os.killpg(child, signum)
    else:
        os.kill(child if who == "parent" else ranks[1], signum)
    assert exit_code(child) == code
    assert (tmp_path / "saved0").exists()
    assert (tmp_path / "saved1").exists()
    assert (tmp_path / "output").read_text() == ""


def test_a_second_signal_stops_at_once(tmp_path):
    child = launch(tmp_path, never_stop, tmp_path)
    ranks = pids(tmp_path)
    os.killpg(child, signal.SIGINT)
    time.sleep(1.2)
    assert all(exists(pid) for pid in ranks)
    os.killpg(child, signal.SIGINT)
    assert exit_code(child) == 130
    assert not any(exists(pid) for pid in ranks)


def test_grace_ends(tmp_path):
    child = launch(tmp_path, never_stop, tmp_path, grace=0.3)
    ranks = pids(tmp_path)
    os.kill(child, signal.SIGTERM)
    assert exit_code(child) == 7
    assert "CommunicationError: the ranks did not stop within 0 s of SIGTERM" in (tmp_path / "output").read_text()
    assert not any(exists(pid) for pid in ranks)


def test_a_killed_rank_outside(tmp_path):
    child = launch(tmp_path, train, tmp_path)
    os.kill(pids(tmp_path)[0], signal.SIGKILL)
    assert exit_code(child) == 7
    assert (tmp_path / "output").read_text().startswith("CommunicationError: rank 0 was killed by signal 9 (SIGKILL)")
    assert (tmp_path / "output").read_text().count("\n") == 0


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell a process of its parent's death")
def test_ranks_die_with_their_parent(tmp_path):
    child = launch(tmp_path, never_stop, tmp_path)
    ranks = pids(tmp_path)
    os.kill(child, signal.SIGKILL)
    assert exit_code(child) == -signal.SIGKILL
    until(lambda: not any(exists(pid) for pid in ranks))
    # Its leftover files are next to the logs, and the next start removes them.
    assert [path.name for path in tmp_path.glob("kumi*")] == []
    (left,) = (tmp_path / "logs").glob(".launch-*")
    assert local.run_ranks(give_back, (0,), nproc=2, log_dir=tmp_path / "logs") == 0
    assert not left.exists()


def test_rank_0_keeps_the_terminal(tmp_path):
    child, terminal = pty.fork()
    if child == 0:
        code = 99
        try:
            code = local.run_ranks(tell_terminal, (tmp_path,), nproc=2, log_dir=tmp_path / "logs")
        finally:
            os._exit(code)
    assert exit_code(child) == 0
    os.close(terminal)
    assert (tmp_path / "0").read_text() == "True True"
    assert (tmp_path / "1").read_text() == "False False"


@pytest.mark.parametrize("kind", ["missing", "closed", "in memory"])
def test_ranks_of_a_program_without_a_terminal_run(tmp_path, monkeypatch, kind):
    for name in ("stdout", "stderr"):
        stream = None if kind == "missing" else io.StringIO()
        if kind == "closed":
            stream.close()
        monkeypatch.setattr(sys, name, stream)
    assert local.run_ranks(meet_and_tell, (tmp_path,), nproc=2, log_dir=tmp_path / "logs") == 0
    assert (tmp_path / "logs" / "rank_00001.log").read_text() == "said by 1\nand by a child\n"
    assert local.run_ranks(lambda: 10 + sys.stdout.isatty(), nproc=1, log_dir=tmp_path) == 10


def test_runs_beside_each_other_do_not_meet(tmp_path):
    folders = [tmp_path / str(number) for number in range(4)]
    for folder in folders:
        folder.mkdir()
    children = [launch(folder, meet) for folder in folders]
    assert [exit_code(child) for child in children] == [0] * 4
