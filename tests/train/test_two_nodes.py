"""Two machines, as two network namespaces joined by a virtual cable: torchrun on each, with the command it is given."""

import contextlib
import multiprocessing
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.train.conftest import losses, run_file
from tests.train.test_failing_ranks import under_agent

from forked import run_forked
from namespaces import enter_namespace, two_namespaces

HEAD, OTHER = "10.66.0.1", "10.66.0.2"  # within the namespaces alone
SLOW = Path(__file__).with_name("slow_data.py")
TIMEOUT_S = 10


@pytest.fixture
def nodes():
    """The names of two network namespaces, HEAD and OTHER."""
    with two_namespaces([HEAD, OTHER]) as names:
        yield names


def torchrun(names, folder, ranks, program, **environ):
    """Return torchrun's output on each node, `ranks` ranks a node, after both have ended with exit code 0."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environ}
    environment.pop("GLOO_SOCKET_IFNAME", None)  # the suite sets it
    with contextlib.ExitStack() as stack:
        agents = []
        for rank, name in reversed(list(enumerate(names))):
            launcher = [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--nnodes",
                "2",
                "--nproc-per-node",
                str(ranks),
                "--node-rank",
                str(rank),
                "--master-addr",
                HEAD,
                "--master-port",
                "29511",
            ]
            command = ["ip", "netns", "exec", name, *launcher, *program]
            output = stack.enter_context(open(folder / f"node{rank}.txt", "w+"))
            agent = subprocess.Popen(
                command, cwd=folder, env=environment, stdout=output, stderr=output, start_new_session=True
            )
            stack.callback(agent.wait)
            stack.callback(agent.kill)
            agents.append((agent, output))
        for agent, output in agents:
            code = agent.wait(timeout=240)
            output.seek(0)
            assert code == 0, output.read()


def start(folder, ranks, *, doctor=False):
    """Write the run file of two nodes with `ranks` ranks each. `doctor`: the run begins with checks of the nodes."""
    shutil.rmtree(folder / "run")
    run_file(folder, cluster={"devices_per_node": ranks, "nodes": 2}, train__timeout_s=TIMEOUT_S, train__doctor=doctor)


def check(folder, small):
    assert losses(folder / "run") == pytest.approx(losses(small.folder / "run"), rel=1e-5)
    assert (folder / "run" / "hf" / "model.safetensors").exists()


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("ranks", "program"),
    [(2, ["-m", "kumi.cli"]), (1, [str(SLOW)])],
    ids=["at-once", "data-prepared-for-longer-than-the-timeout"],
)
def test_two_nodes_train_as_one_process(nodes, small, tmp_path, ranks, program):
    folder = small.copy(tmp_path)
    start(folder, ranks)
    torchrun(nodes, folder, ranks, [*program, "train", "run.toml"], SLOW_SECONDS=str(TIMEOUT_S + 2))
    check(folder, small)


def on_a_node(name, node, folder):
    """Torchrun's agent with one rank in the network namespace `name`, in this process, which was forked for it."""
    enter_namespace(name)
    os.environ.pop("GLOO_SOCKET_IFNAME", None)  # the suite sets it
    os.environ["SLOW_SECONDS"] = str(TIMEOUT_S + 2)
    os.chdir(folder)
    sys.exit(under_agent(folder, slow_rank, nodes=2, node=node, head=f"{HEAD}:29511"))


def slow_rank(folder):
    import slow_data

    sys.exit(slow_data.main(["train", "run.toml"]))


def both(names, folder):
    """The agents of both nodes, each in a process."""
    sys.path.insert(0, str(SLOW.parent))
    context = multiprocessing.get_context("fork")
    agents = [context.Process(target=on_a_node, args=(name, node, folder)) for node, name in enumerate(names)]
    for agent in agents:
        agent.start()
    for agent in agents:
        agent.join()
    sys.exit(max(abs(agent.exitcode) for agent in agents))


@pytest.mark.exhaustive
def test_nodes_wait_for_data_that_takes_longer_than_the_timeout(nodes, small, tmp_path):
    folder = small.copy(tmp_path)
    start(folder, 1, doctor=True)
    code, stdout, stderr = run_forked(both, nodes, folder, timeout=240)
    assert code == 0, stdout + stderr
    assert "checks of 2 ranks passed" in stdout
    check(folder, small)
