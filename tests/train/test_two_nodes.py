"""Two machines, as two network namespaces joined by a virtual cable: torchrun on each, with the command it is given."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.train.conftest import losses, run_file

HEAD, OTHER = "10.66.0.1", "10.66.0.2"  # within the namespaces alone
SLOW = Path(__file__).with_name("slow_data.py")
TIMEOUT_S = 10


def ip(*words):
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def remove(name):
    """End the processes in the namespace, which may have lost their agent, and delete it."""
    for pid in ip("netns", "pids", name).split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    ip("netns", "del", name)


@pytest.fixture
def nodes():
    """The names of two network namespaces, HEAD and OTHER."""
    if sys.platform != "linux" or os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need Linux, root and iproute2")
    names = [f"kumi-{os.getpid()}-{number}" for number in range(2)]
    with contextlib.ExitStack() as stack:
        try:
            for name in names:
                ip("netns", "add", name)
                stack.callback(remove, name)
            ip("link", "add", "veth0", "netns", names[0], "type", "veth", "peer", "name", "veth0", "netns", names[1])
            for name, address in zip(names, (HEAD, OTHER)):
                ip("-n", name, "addr", "add", f"{address}/24", "dev", "veth0")
                ip("-n", name, "link", "set", "veth0", "up")
                ip("-n", name, "link", "set", "lo", "up")
        except OSError as error:
            pytest.skip(f"network namespaces are not allowed here: {error}")
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


@pytest.mark.parametrize(
    ("ranks", "program"),
    [
        pytest.param(2, ["-m", "kumi.cli"], marks=pytest.mark.exhaustive, id="at-once"),
        pytest.param(1, [str(SLOW)], id="data-prepared-for-longer-than-the-timeout"),
    ],
)
def test_two_nodes_train_as_one_process(nodes, small, tmp_path, ranks, program):
    folder = small.copy(tmp_path)
    shutil.rmtree(folder / "run")
    run_file(folder, cluster={"devices_per_node": ranks, "nodes": 2}, train__timeout_s=TIMEOUT_S)
    torchrun(nodes, folder, ranks, [*program, "train", "run.toml"], SLOW_SECONDS=str(TIMEOUT_S + 2))
    assert losses(folder / "run") == pytest.approx(losses(small.folder / "run"), rel=1e-5)
    assert (folder / "run" / "hf" / "model.safetensors").exists()
