"""The place of this process in a run: a node's agent, a launcher's rank, or alone; and the network to rank 0."""

import os

import pytest

from kumi.cli import main
from kumi.errors import ConfigError, LayoutError
from kumi.launch.oom import oom_kills
from kumi.launch.standing import (
    HeadAddress,
    LaunchedRank,
    Standing,
    find_standing,
    first_host,
    interface_to,
    launched_rank,
    outward_interface,
)
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


KUMI = {"KUMI_NODE": "1", "KUMI_NODES": "4", "KUMI_HEAD": "node-0.jobs:29400"}
PET = {
    "PET_NODE_RANK": "1",
    "PET_NNODES": "4",
    "PET_NPROC_PER_NODE": "8",
    "PET_MASTER_ADDR": "job-node-0-0.job",
    "PET_MASTER_PORT": "29400",
}
STEP = {  # of `srun --nodes=2 --ntasks-per-node=1`, as Slurm 22.05 sets it
    "SLURM_JOB_ID": "12",
    "SLURM_STEP_ID": "1",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_NTASKS": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "localhost,gpu[003-4]",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.99",  # of the login node, where srun was started
}
# As the shell of a batch script and that of salloc see a job of two nodes.
BATCH = {"SLURM_JOB_ID": "12", "SLURM_NODEID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NNODES": "2"}
SALLOC = {"SLURM_JOB_ID": "12", "SLURM_NNODES": "2", "SLURM_NTASKS": "2", "SLURM_TASKS_PER_NODE": "1(x2)"}
SKY = {
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2\n",
    "SKYPILOT_NUM_GPUS_PER_NODE": "8",
    "SKYPILOT_TASK_ID": "sky-2026-11-02",
}
INDEX = {"JOB_COMPLETION_INDEX": "3"}
BY_KUMI = Standing(1, 4, HeadAddress("node-0.jobs", 29400), None, "KUMI_NODE, KUMI_NODES and KUMI_HEAD")
SLURM_HEAD = HeadAddress("localhost", 20_113)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        (KUMI, BY_KUMI),
        (KUMI | RANK | MEETING, BY_KUMI),
        (KUMI | STEP, BY_KUMI),
        (RANK | MEETING | PET, LaunchedRank(5, 8, None)),  # torchrun read PET's variables, and started this rank
        (PET, Standing(1, 4, HeadAddress("job-node-0-0.job", 29400), 8, "a TrainJob (PET_NODE_RANK)")),
        (PET | {"PET_NNODES": "1", "PET_NODE_RANK": "0"}, None),
        (STEP, Standing(1, 2, SLURM_HEAD, None, "srun, one task a node")),
        # `srun --mpi=pmi2` gives the same numbers as PMI's.
        (STEP | {"PMI_RANK": "1", "PMI_SIZE": "2"}, Standing(1, 2, SLURM_HEAD, None, "srun, one task a node")),
        (STEP | MPIRUN | MEETING, LaunchedRank(5, 8, 1)),  # mpirun uses srun to start one daemon a node
        (STEP | {"SLURM_STEP_NUM_TASKS": "4"} | MEETING, LaunchedRank(1, 4, 0)),  # as many tasks as ranks
        (BATCH, None),
        (SALLOC, None),
        (SALLOC | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NUM_NODES": "1", "SLURM_PROCID": "0"}, None),
        (SKY | {"SKYPILOT_NUM_NODES": "1", "SKYPILOT_NODE_RANK": "0"}, None),
        (INDEX, None),  # each index of an Indexed Job may be a run of its own
        (
            INDEX | {"KUMI_NODES": "4", "KUMI_HEAD": "[fd00::1]:29400"},
            Standing(3, 4, HeadAddress("fd00::1", 29400), None, "KUMI_NODE, KUMI_NODES and KUMI_HEAD"),
        ),
        (
            STEP | {"KUMI_HEAD": "10.0.0.7:30000"},
            Standing(1, 2, HeadAddress("10.0.0.7", 30000), None, "KUMI_NODE, KUMI_NODES and KUMI_HEAD"),
        ),
    ],
)
def test_the_first_source_says_where_a_node_stands(environ, expected):
    assert find_standing(environ) == expected


def test_the_command_line_comes_first():
    standing = find_standing(KUMI | RANK, node=0, nodes=2, head="[fe80::1%eth0]:1234")
    assert standing == Standing(0, 2, HeadAddress("fe80::1%eth0", 1234), None, "the command line")
    assert str(standing.head) == "[fe80::1%eth0]:1234"
    assert find_standing({}, nodes=1) is None


def test_skypilot_names_its_addresses_and_every_task_has_its_port():
    standing = find_standing(SKY)
    assert (standing.node, standing.nodes, standing.head.host, standing.local_ranks) == (1, 2, "10.0.0.1", 8)
    assert 20_000 <= standing.head.port < 30_000
    assert find_standing(SKY | {"SKYPILOT_TASK_ID": "another"}).head.port != standing.head.port
    assert find_standing(SKY | {"SKYPILOT_NODE_RANK": "0"}).head == standing.head


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        ("n0", "n0"),
        ("n[0-2]", "n0"),
        ("gpu[007-009,12],cpu1", "gpu007"),
        ("a,b[1-2]", "a"),
        ("r[1-2]c[03,5]-ib", "r1c03-ib"),
        ("r[1,3]n4", "r1n4"),
    ],
)
def test_the_first_host_of_slurms_list(hosts, expected):
    assert first_host(hosts) == expected


def test_a_node_without_a_name_in_the_network_has_slurms_address(tmp_path, monkeypatch):
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho NodeName=$4 Arch=x NodeAddr=10.9.8.7 NodeHostName=$4\n")
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert find_standing(STEP | {"SLURM_STEP_NODELIST": "kumi-[7-8].invalid"}).head.host == "10.9.8.7"


@pytest.mark.parametrize(
    ("environ", "options", "words"),
    [
        ({"KUMI_NODES": "4"}, {}, "KUMI_NODES=4 does not .* it lacks --node or KUMI_NODE and --head or KUMI_HEAD"),
        ({}, {"node": 1, "nodes": 2}, "--node=1, --nodes=2 .* it lacks --head or KUMI_HEAD; start `kumi train` on ev"),
        ({"KUMI_NODE": "1"}, {"head": "a:1"}, "--head=a:1, KUMI_NODE=1 .* it lacks --nodes or KUMI_NODES"),
        (BATCH | {"KUMI_NODES": "2", "KUMI_HEAD": "a:1"}, {}, "it lacks --node or KUMI_NODE;"),
        (KUMI | {"KUMI_NODE": "4"}, {}, "numbered from 0, below the number of nodes"),
        (KUMI | {"KUMI_NODES": "0"}, {}, "numbered from 0, below the number of nodes"),
        (KUMI | {"KUMI_NODE": "-1"}, {}, "KUMI_NODE=-1, .*: KUMI_NODE is not a number"),
        (PET | {"PET_NNODES": "1:4"}, {}, "PET_NNODES is not a number"),
        ({key: PET[key] for key in list(PET)[1:]}, {}, "PET_NNODES=4, .* it lacks --node or KUMI_NODE"),
        ({key: value for key, value in STEP.items() if key != "SLURM_NODEID"}, {}, "SLURM_STEP_NUM_NODES=2, "),
        ({"SKYPILOT_NODE_RANK": "1"}, {}, "SKYPILOT_NODE_RANK=1 does not describe"),
        *(
            (KUMI | {"KUMI_HEAD": head}, {}, "is not HOST:PORT, or")
            for head in ("host", "host:0", "host:65536", "fd00::1:29400", "[host]:1", "a b:1", "host:1;x")
        ),
    ],
)
def test_half_of_a_place_is_refused_with_what_was_seen(environ, options, words):
    with pytest.raises(ConfigError, match=words):
        find_standing(environ, **options)


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


SRUN_NODES = {"SLURM_NODEID": "1", "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}


@pytest.mark.parametrize(
    "command",
    [("eval", "model", "--data", "texts.jsonl"), ("generate", "model", "--prompt", "a"), ("bench", "--quick")],
    ids=lambda command: command[0],
)
def test_commands_of_one_machine_refuse_several_nodes(monkeypatch, capsys, command):
    """srun starts one task on each of two nodes: both would do all of the work."""
    for name, value in (SRUN_NODES | {"SLURM_STEP_NODELIST": "n[1-2]", "SLURM_JOB_ID": "7"}).items():
        monkeypatch.setenv(name, value)
    assert main(command) == 2
    verb = command[0]
    assert capsys.readouterr().err.startswith(
        f"ConfigError: {verb}: it was started on 2 nodes (srun, one task a node), and each would do all of the work, "
        f"since kumi {verb} works on one machine; start it once (srun --nodes=1 --ntasks=1)"
    )
