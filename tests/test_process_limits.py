"""The memory and the cores that this process may use."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from kumi.process_limits import free_memory, usable_cores

GROUPS = {"new": "0::/user.slice/session.scope\n", "old": "9:name=systemd:/\n4:cpu,memory:/user/job\n0::/\n"}


def write_group(folder, old, limit, use, inactive):
    """Write a control group's files of memory."""
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if old else ("memory.max", "memory.current")
    for name, number in zip(names, (limit, use)):
        (folder / name).write_text(f"{number}\n")
    line = "total_inactive_file" if old else "inactive_file"
    (folder / "memory.stat").write_text(f"active_file 5\n{line} {inactive}\n")


@pytest.fixture
def machine(tmp_path):
    """Return a function that writes the files of a machine with 4,000 KiB available, and asks for its free memory."""

    def free(groups, limits):
        """`limits`: folder of a control group -> limit, use, bytes of files."""
        (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    4000 kB\n")
        (tmp_path / "cgroup").write_text(GROUPS[groups])
        for folder, numbers in limits.items():
            write_group(tmp_path / "mount" / folder, groups == "old", *numbers)
        return free_memory(tmp_path / "meminfo", tmp_path / "cgroup", tmp_path / "mount")

    return free


@pytest.mark.parametrize(
    ("groups", "limits", "expected"),
    [
        ("new", {}, 4_096_000),
        ("new", {"user.slice/session.scope": ("max", 10, 0), "user.slice": (900, 300, 50)}, 650),
        ("new", {"user.slice/session.scope": (400, 300, 0), "user.slice": (900, 300, 0)}, 100),
        ("new", {"": (900, 1000, 0)}, 0),
        ("old", {"memory/user/job": (9223372036854771712, 10, 0), "memory": (700, 300, 20)}, 420),
        ("old", {"memory/user/job": (9223372036854771712, 10, 0)}, 4_096_000),
    ],
)
def test_free_memory_is_what_every_group_has_left(machine, groups, limits, expected):
    assert machine(groups, limits) == expected


def test_free_memory_is_unknown_without_proc(tmp_path):
    assert free_memory(tmp_path / "none", tmp_path / "none", tmp_path) is None


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity of processes")
def test_usable_cores_are_those_that_the_process_may_run_on():
    code = (
        "import os; from kumi.process_limits import usable_cores; "
        "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); print(usable_cores())"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "1\n"
    assert usable_cores() == len(os.sched_getaffinity(0))


# Ends the program when it imports torch, and shows the policy that OpenMP would read then.
SHOW_POLICY = """
import os, sys
class Finder:
    def find_spec(self, name, *rest):
        if name == "torch":
            print(os.environ.get("OMP_WAIT_POLICY"), flush=True)
            os._exit(0)
sys.meta_path.insert(0, Finder())
"""


@pytest.mark.parametrize(
    ("program", "policy", "expected"),
    [
        ("from kumi.cli import main; main(['eval', 'none', '--data', 'a.txt'])", None, "PASSIVE"),
        ("from kumi.cli import main; main(['generate', 'none', '--prompt', 'a'])", None, "PASSIVE"),
        ("import kumi; kumi.generate('none', 'a')", None, "PASSIVE"),
        ("import kumi; kumi.generate('none', 'a')", "ACTIVE", "ACTIVE"),
    ],
)
def test_threads_sleep_before_torch_is_imported(program, policy, expected):
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    environment |= {} if policy is None else {"OMP_WAIT_POLICY": policy}
    command = [sys.executable, "-c", SHOW_POLICY + program]
    assert (
        subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout == f"{expected}\n"
    )
