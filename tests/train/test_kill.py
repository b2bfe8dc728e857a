"""Kills at random moments, Ctrl-C and SIGTERM, and an outside launcher: a run survives all of them, exactly."""

import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.train.conftest import losses, metrics, run_file
from tests.train.test_failing_ranks import command

from kumi.cli import main

# Steps of a run: enough for the saves that are waited for, ten kills' of `pytest --all` among them.
STEPS, ALL_STEPS = 15, 24


@pytest.fixture(scope="module")
def steps(request):
    return ALL_STEPS if request.config.getoption("--all") else STEPS


def long_run(folder, steps):
    """A run of two ranks whose checkpoints are large enough for a kill to fall into a save."""
    wide = {
        "model_type": "llama",
        "vocab_size": 320,
        "hidden_size": 256,
        "intermediate_size": 512,
        "rms_norm_eps": 1e-5,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
    }
    return run_file(
        folder,
        model__config=wide,
        cluster__devices_per_node=2,
        layout={"zero": 3},
        train__steps=steps,
        checkpoint={"every": 3, "keep": 2},
    )


@pytest.fixture(scope="module")
def uninterrupted(small, steps, tmp_path_factory):
    folder = small.copy(tmp_path_factory.mktemp("uninterrupted"))
    shutil.rmtree(folder / "run")
    with contextlib.chdir(folder):
        assert main(["train", str(long_run(folder, steps))]) == 0
    return losses(folder / "run")


class Child:
    """The command in a child of this process, like a `subprocess.Popen`: PyTorch need not be imported once more. Under
    torchrun's agent if `way` is "torchrun"."""

    def __init__(self, folder, way="two"):
        self.pid = command(folder, None, way, folder / "output.txt")
        self.returncode = None

    def poll(self):
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout=60):
        until = time.monotonic() + timeout
        while self.poll() is None:
            assert time.monotonic() < until, "it did not end"
            time.sleep(0.01)
        return self.returncode


@contextlib.contextmanager
def program(folder, run):
    """`python -m kumi train` in a process group of its own."""
    words = [sys.executable, "-m", "kumi", "train", str(run)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with open(folder / "output.txt", "a") as output:
        started = subprocess.Popen(
            words, cwd=folder, stdout=output, stderr=output, start_new_session=True, env=environment
        )
    with ending(started) as process:
        yield process


@contextlib.contextmanager
def training(folder, way="two"):
    """`kumi train run.toml` in a process group of its own."""
    with ending(Child(folder, way)) as process:
        yield process


@contextlib.contextmanager
def ending(process):
    """Kill the remaining processes of the group of `process`."""
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def ranks_of(process):
    """Process ids of the ranks: the children of the command's process that outlive a glance."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    return [int(word) for word in children.read_text().split()] if children.exists() else []


def wait_for(condition, process, seconds=60):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "waited in vain"
        if process.poll() is not None:
            return False
        time.sleep(0.002)
    return True


def last_step(folder):
    entries = metrics(folder / "run") if (folder / "run" / "metrics.jsonl").exists() else []
    return max((entry["step"] for entry in entries), default=0)


@pytest.mark.parametrize("kills", [3, pytest.param(10, marks=pytest.mark.exhaustive)])
def test_any_rank_killed_at_any_moment_costs_nothing_but_time(small, steps, tmp_path, uninterrupted, kills):
    """SIGKILLs, two or more of them while a checkpoint is being written."""
    folder = small.copy(tmp_path)
    shutil.rmtree(folder / "run")
    draw = random.Random(5)
    long_run(folder, steps)
    root = folder / "run" / "checkpoints"
    in_saves = 0
    for kill in range(kills):
        with training(folder) as process:
            begun = last_step(folder)
            if kill < 2 or kill % 3 == 0:
                # Past the drill, which writes into a folder of its own.
                saving = lambda: any(root.glob("step_*.tmp")) and last_step(folder) > begun  # noqa: E731, B023
                assert wait_for(saving, process)
                in_saves += any(root.glob("step_*.tmp"))
            else:
                assert wait_for(lambda: len(ranks_of(process)) >= 2, process)
                time.sleep(draw.uniform(0, 1.0))
            ranks = ranks_of(process)
            if not ranks:
                break  # it has finished already
            with contextlib.suppress(ProcessLookupError):
                os.kill(draw.choice(ranks), signal.SIGKILL)
            assert process.wait(timeout=60) == 7, (folder / "output.txt").read_text()
    with training(folder) as process:
        assert process.wait(timeout=120) == 0, (folder / "output.txt").read_text()
    assert in_saves >= 2
    assert losses(folder / "run") == uninterrupted


# tests/launch shows the codes of all signals, a terminal's to all processes among them; here is one to one process, a
# child of this one by default.
@pytest.mark.parametrize(
    ("number", "code"),
    [
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.exhaustive),
        (signal.SIGTERM, 143),
        pytest.param(signal.SIGUSR1, 75, marks=pytest.mark.exhaustive),
    ],
)
def test_a_signal_saves_and_ends_the_run_which_then_goes_on(small, steps, tmp_path, uninterrupted, number, code):
    folder = small.copy(tmp_path)
    shutil.rmtree(folder / "run")
    run = long_run(folder, steps)
    with training(folder) if number == signal.SIGTERM else program(folder, run) as process:
        assert wait_for(lambda: last_step(folder) >= 4, process)
        if number == signal.SIGINT:
            os.killpg(process.pid, number)  # as a terminal does
        else:
            os.kill(process.pid, number)
        assert process.wait(timeout=60) == code, (folder / "output.txt").read_text()
    stopped = last_step(folder)
    assert f"step_{stopped:06d}" in {path.name for path in (folder / "run" / "checkpoints").iterdir()}
    with training(folder) as process:
        assert process.wait(timeout=120) == 0
    assert f"resumed after step {stopped}" in (folder / "output.txt").read_text()
    assert losses(folder / "run") == uninterrupted


def test_ranks_of_an_outside_launcher_train_the_same(small, steps, tmp_path, uninterrupted):
    """The agent and the ranks of torchrun are forked, with what torchrun tells them."""
    folder = small.copy(tmp_path)
    shutil.rmtree(folder / "run")
    long_run(folder, steps)
    with training(folder, "torchrun") as process:
        assert process.wait(timeout=120) == 0, (folder / "output.txt").read_text()
    assert losses(folder / "run") == uninterrupted
    assert (folder / "run" / "hf" / "model.safetensors").exists()


@pytest.mark.exhaustive
def test_an_outside_launcher_starts_the_ranks(small, steps, tmp_path, uninterrupted):
    folder = small.copy(tmp_path)
    shutil.rmtree(folder / "run")
    run = long_run(folder, steps)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    words = [*launcher, sys.executable, "-m", "kumi", "train", str(run)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=120, env=environment)
    assert ended.returncode == 0, ended.stderr
    assert losses(folder / "run") == uninterrupted
    assert (folder / "run" / "hf" / "model.safetensors").exists()
