"""The rank of this process: torchrun's, srun's and mpirun's variables, and the network to rank 0."""

import pytest

from kumi.errors import LayoutError
from kumi.launch.oom import oom_kills
from kumi.launch.standing import LaunchedRank, interface_to, launched_rank, outward_interface
from kumi.parallel.mesh import init_distributed

MEETING = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
SRUN = {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1", "SLURM_NTASKS": "8"}
MPIRUN = {"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
RANK = {"RANK": "5", "WORLD_SIZE": "8"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        ({"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "8"}, None),  # a batch script
        (SRUN | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, None),  # srun of one program
        ({"RANK": "0", "WORLD_SIZE": "1"}, LaunchedRank(0, 1, 0)),
        (RANK | {"LOCAL_RANK": "1"} | MEETING, LaunchedRank(5, 8, 1)),
        (RANK | MEETING, LaunchedRank(5, 8, None)),
        (SRUN | MEETING, LaunchedRank(5, 8, 1)),
        (MPIRUN | MEETING, LaunchedRank(5, 8, 1)),
        ({"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1"} | MEETING, LaunchedRank(5, 8, 1)),
        # mpirun in a Slurm job: srun started its daemons, one a node.
        (
            SRUN | {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0"} | MPIRUN | MEETING,
            LaunchedRank(5, 8, 1),
        ),
        # srun --mpi=pmi2 sets the numbers of its own step in PMI's variables.
        (SRUN | {"PMI_RANK": "5", "PMI_SIZE": "8"} | MEETING, LaunchedRank(5, 8, 1)),
        (RANK | SRUN | MEETING, LaunchedRank(5, 8, 1)),
        # One task a node, which has started its ranks itself: SLURM_LOCALID counts tasks.
        (RANK | SRUN | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"} | MEETING, LaunchedRank(5, 8, None)),
        (RANK | SRUN | {"LOCAL_RANK": "3"} | MEETING, LaunchedRank(5, 8, 3)),
    ],
)
def test_launchers(environ, expected):
    assert launched_rank(environ) == expected


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        (
            {"RANK": "0"},
            r"sets RANK=0, which does not describe a rank of a launcher \(torchrun\): set WORLD_SIZE and MASTER_ADDR",
        ),
        ({"RANK": "x", "WORLD_SIZE": "2"} | MEETING, "sets RANK=x, WORLD_SIZE=2, MASTER_ADDR=10.0.0.1"),
        ({"RANK": "2", "WORLD_SIZE": "2"} | MEETING, "a rank is a number below the number of ranks"),
        (RANK, "set MASTER_ADDR and MASTER_PORT, too"),
        (RANK | MEETING | {"LOCAL_RANK": "-1"}, "LOCAL_RANK=-1"),
        (SRUN, r"SLURM_STEP_NUM_TASKS=8, which does not describe a rank of a launcher \(srun\): set MASTER_ADDR"),
        ({"SLURM_STEP_NUM_TASKS": "8"} | MEETING, "set SLURM_PROCID"),
    ],
)
def test_incomplete_rank_variables_are_refused(environ, words):
    with pytest.raises(LayoutError, match=words):
        launched_rank(environ)


def test_torch_gets_its_own_names():
    assert LaunchedRank(5, 8, 1).torch_environment() == {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
    assert LaunchedRank(5, 8, None).torch_environment() == RANK


@pytest.mark.parametrize(
    ("local_rank", "gpus", "words"),
    [("2", 2, "LOCAL_RANK=2 and this machine shows 2 GPUs"), (None, 8, "rank 1 of 4 does not know its GPU")],
)
def test_a_rank_without_a_gpu_is_refused(monkeypatch, local_rank, gpus, words):
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    with pytest.raises(LayoutError, match=words):
        init_distributed("cuda")


HEADER = "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT\n"
# A default route by eth0, 10.1.0.0/16 by ib0, 10.1.2.0/24 by eth1 and, of a higher metric, by eth2; eth3 is down.
ROUTES = HEADER + "\n".join(
    f"{name}\t{destination}\t00000000\t{flags}\t0\t0\t{metric}\t{mask}\t0\t0\t0"
    for name, destination, flags, metric, mask in [
        ("eth0", "00000000", "0003", 0, "00000000"),
        ("ib0", "0000010A", "0001", 0, "0000FFFF"),
        ("eth2", "0002010A", "0001", 9, "00FFFFFF"),
        ("eth1", "0002010A", "0001", 0, "00FFFFFF"),
        ("eth3", "0003010A", "0000", 0, "00FFFFFF"),
    ]
)
ROUTES_6 = "\n".join(
    f"{destination} {length} {'0' * 32} 00 {'0' * 32} 00000400 00000001 00000000 00000001 {name}"
    for destination, length, name in [
        ("fd00" + "0" * 28, "40", "eth0"),
        ("fd00" + "0" * 27 + "2", "80", "lo"),
        ("0" * 32, "00", "eth1"),
    ]
)


@pytest.mark.skipif("sys.platform != 'linux'", reason="the tables are those of Linux")
@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("10.1.2.3", "eth1"),
        ("10.1.3.3", "ib0"),
        ("192.0.2.7", "eth0"),
        ("127.0.1.1", "lo"),
        ("::1", "lo"),
        ("fd00::2", "eth0"),
        ("2001:db8::1", "eth1"),
        ("no such host", None),
    ],
)
def test_the_interface_of_the_most_exact_route(host, expected):
    assert interface_to(host, ROUTES, ROUTES_6) == expected


@pytest.mark.skipif("sys.platform != 'linux'", reason="the tables are those of Linux")
def test_the_default_route():
    assert outward_interface(ROUTES) == "eth0"
    assert outward_interface(HEADER) is None


@pytest.mark.parametrize(
    ("groups", "file", "text", "expected"),
    [
        ("0::/user/job\n", "user/job/memory.events", "oom 7\noom_kill 3\noom_group_kill 0\n", 3),
        ("0::/elsewhere\n", "memory.events", "oom_kill 2\n", 2),  # a container sees its group as the root
        ("4:memory:/job\n0::/\n", "memory/job/memory.oom_control", "under_oom 0\noom_kill 1\n", 1),
        ("0::/\n", "nothing", "", None),
    ],
)
def test_processes_killed_for_memory(tmp_path, groups, file, text, expected):
    counter = tmp_path / "mount" / file
    counter.parent.mkdir(parents=True)
    counter.write_text(text)
    (tmp_path / "cgroup").write_text(groups)
    assert oom_kills(tmp_path / "cgroup", tmp_path / "mount") == expected
