"""Programs in bubblewrap, its limits, and its self-test. What a program of a test tries would do no harm outside."""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest

from forked import run_forked
from kumi.errors import ConfigError
from kumi.rewards import RewardRequest, RewardScorer, spec_from
from kumi.rewards.sandbox import bwrap, control_groups, probes
from kumi.rewards.sandbox.bwrap import open_bwrap, sandbox_from
from kumi.rewards.sandbox.control_groups import PREFIX, GroupFolders, remove_left_groups, writable_groups
from kumi.rewards.sandbox.interpreter import interpreter_at
from kumi.rewards.sandbox.program_run import Outcome, ProgramLimits
from kumi.rewards.sandbox.syscall_filter import filter_program
from session_processes import runs_with

LIMITS = ProgramLimits(memory=96 << 20, processes=6, files=4 << 20, output=64 << 10)
SYSTEM_PYTHON = "/usr/bin/python3"


@cache
def why_not():
    """Return why no program runs in bwrap here; "" if one does."""
    if shutil.which("bwrap") is None:
        return "bubblewrap is not installed: apt-get install --no-install-recommends bubblewrap"
    try:
        sandbox = open_bwrap(LIMITS, interpreter_at(""), f"{PREFIX}{os.getpid()}", 1)
        outcome = sandbox.run("print(1)", b"", 60.0)
    except (ConfigError, OSError) as error:
        return str(error)
    return "" if outcome.output == b"1\n" else f"bwrap runs no program here: {outcome.errors.decode()}"


@pytest.fixture(scope="module")
def sandbox():
    if why_not():
        pytest.skip(why_not())
    return open_bwrap(LIMITS, interpreter_at(""), f"{PREFIX}{os.getpid()}", 1)


def left_groups():
    folders = writable_groups()
    places = set() if folders is None else {folders.memory, folders.pids}
    return [group for folder in places for group in folder.glob(f"{PREFIX}{os.getpid()}*")]


def test_a_program_has_its_input_and_an_empty_folder(sandbox):
    program = """
import os, sys
print(input())
open("/tmp/a", "w").write("x" * 1000)
print(os.listdir("."), os.environ.get("HOME"), os.getuid() != 0, hash("a"))
print("to stderr", file=sys.stderr)
raise SystemExit(7)
"""
    outcomes = [sandbox.run(program, b"given\n", 60.0) for _ in range(2)]
    assert outcomes[0] == outcomes[1]
    code, output, errors = outcomes[0].code, outcomes[0].output.decode(), outcomes[0].errors
    assert (code, errors, outcomes[0].ended) == (7, b"to stderr\n", "")
    assert output.startswith("given\n['a'] /tmp True")
    assert left_groups() == []


def test_a_sandbox_is_the_same_in_another_process(sandbox):
    assert sandbox_from(sandbox.as_json()) == sandbox
    assert sandbox_from(dataclasses.replace(sandbox, groups=None).as_json()).groups is None


def test_the_self_test_passes(sandbox):
    probes.check_isolation(sandbox)
    assert left_groups() == []


def test_threads_and_processes_within_the_limits_run(sandbox):
    program = "import multiprocessing as m\nwith m.Pool(2) as pool: print(pool.map(abs, [1, -2]))"
    large = dataclasses.replace(sandbox, limits=dataclasses.replace(LIMITS, processes=12))
    assert large.run(program, b"", 60.0).output == b"[1, 2]\n"


@pytest.mark.skipif(os.geteuid() != 0 or not os.path.exists(SYSTEM_PYTHON), reason="needs root, to become another user")
def test_an_unprivileged_user_without_control_groups_has_resource_limits(sandbox):
    code, output, errors = run_forked(_self_test_of_another_user)
    if "cannot run on this machine" in errors:
        pytest.skip("this machine allows no user namespaces to unprivileged users")
    assert (code, output) == (0, "None\n"), errors


def _self_test_of_another_user():
    os.setgroups([])
    os.setgid(61234)
    os.setuid(61234)
    os.environ["HOME"] = "/nonexistent"
    sandbox = open_bwrap(LIMITS, interpreter_at(SYSTEM_PYTHON), f"{PREFIX}{os.getpid()}", 1)
    probes.check_isolation(sandbox)
    print(sandbox.groups)


class OpenDoor:
    """Runs programs without any sandbox, so that each probe gets out."""

    limits = dataclasses.replace(LIMITS, memory=80 << 20, processes=3)

    def run(self, program: str, stdin: bytes, timeout_s: float) -> Outcome:
        process = subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        ended = ""
        try:
            output, errors = process.communicate(stdin, min(timeout_s, 5.0))
        except subprocess.TimeoutExpired:
            ended = "time"
        with suppress(ProcessLookupError):  # its group is empty
            os.killpg(process.pid, signal.SIGKILL)
        if ended:
            output, errors = process.communicate()
        # One that keeps no deadline either.
        return Outcome(process.returncode, output, errors, "" if timeout_s < 1 else ended)


@pytest.mark.exhaustive
def test_each_probe_sees_the_way_out():
    escapes = {reach: probe(OpenDoor()) for reach, probe in probes._PROBES.items()}
    assert escapes == {
        "network": "connects to a listener outside of it",
        "files": "reads a file outside of it",
        "processes": "sees a process outside of it",
        "privileges": "has privileges",
        "number of processes": "starts more than 3 processes",
        "memory": f"has more than {80 << 20} bytes of memory",
        "written files": f"writes more than {4 << 20} bytes of files",
        "output": f"prints more than {64 << 10} bytes",
        "time": "is not ended after 0.5 s",
        "processes at its end": "leaves a process behind",
    }
    with pytest.raises(ConfigError, match=r"a program connects to a listener outside of it \(network\)"):
        probes.check_isolation(OpenDoor())


def test_a_probe_that_did_not_run_shows_nothing():
    class Silent(OpenDoor):
        def run(self, program, stdin, timeout_s):
            return Outcome(1, stdin, b"no such module\n")

    with pytest.raises(ConfigError, match="ended with code 1, so that nothing is known about it: no such module"):
        probes.check_isolation(Silent())
    with pytest.raises(ConfigError, match="cannot run on this machine: a program ends with code 1: no such module"):
        probes.check_isolation(
            type("Broken", (Silent,), {"run": lambda self, *_: Outcome(1, b"", b"no such module\n")})()
        )


# What replies try, with a test that passes where they get out.
ESCAPES = {
    "a fork bomb": """
import os, time
forks = 0
for _ in range(26):
    try:
        if os.fork() == 0:
            time.sleep(300)
            os._exit(0)
        forks += 1
    except OSError:
        break
out = forks > 6
""",
    "a large allocation": """
blocks = []
for _ in range(160):
    blocks.append(bytearray(b"x") * (1 << 20))
out = True
""",
    "endless output": """
import os
for _ in range(64):
    os.write(3, b"x" * (1 << 16))
out = True
""",
    "the network": """
import socket
try:
    socket.create_connection(("127.0.0.1", {port}), 2).close()
    out = True
except OSError:
    out = False
""",
    "a file outside": """
import os
out = os.path.exists({canary!r}) or os.path.exists(os.path.dirname({canary!r}))
""",
    "a signal to the parent": """
import os
out = False
for pid in ({parent}, {worker}):
    try:
        os.kill(pid, 0)
        out = out or not os.path.exists("/proc/%d" % pid)
    except OSError:
        pass
""",
    "other processes": """
import os
out = False
for name in filter(str.isdigit, os.listdir("/proc")):
    try:
        out = out or "{token}" in open("/proc/%s/cmdline" % name).read()
    except OSError:
        pass
""",
    "an early end": "import os\nos._exit(0)\n",
    "a wrong verdict": "import os\nos.write(3, b'[0]\\n')\n",
    "a sleep": "import time\ntime.sleep(300)\nout = True\n",
}


def test_no_reply_gets_out_and_training_goes_on(sandbox, tmp_path):
    (tmp_path / "canary").write_text("x")
    token = f"300.{os.getpid()}5519"
    code = {"kind": "code", "memory_mb": 96, "processes": 6, "files_mb": 4, "output_kb": 64, "timeout_s": 10.0}
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        subprocess.Popen(["sleep", token]) as sleeper,
        RewardScorer([spec_from(code)], tmp_path, 2, 100) as scorer,
    ):
        facts = {
            "port": server.getsockname()[1],
            "canary": str(tmp_path / "canary"),
            "parent": sleeper.pid,
            "worker": scorer._workers._workers[0].process.pid,
            "token": token,
        }
        good = "```python\nout = True\n```"
        leaving = "```python\nimport os, time\nif os.fork() == 0:\n    time.sleep(300.5519)\nout = True\n```"
        replies = [f"```python\n{text.format(**facts)}```" for text in ESCAPES.values()]
        results = scorer.score(
            [RewardRequest("p", reply, {"tests": ["assert out"]}, 1, False) for reply in [*replies, good, leaving]]
        )
        rewards = dict(zip([*ESCAPES, "good", "a sleeping child"], (result.total for result in results), strict=True))
        assert rewards == dict.fromkeys(ESCAPES, 0.0) | {"good": 1.0, "a sleeping child": 1.0}
        # Nothing is left, and training goes on.
        assert not runs_with("300.5519")
        assert left_groups() == []
        again = scorer.score([RewardRequest("p", good, {"tests": ["assert out"]}, 1, False)] * 3)
        assert [result.total for result in again] == [1.0] * 3
        assert scorer.faults["code"].exceptions == scorer.faults["code"].timeouts == 0
        sleeper.kill()


def test_output_beyond_the_limit_ends_a_program(sandbox):
    # The test's process ends it where the sandbox does not.
    outcome = sandbox.run("for _ in range(4000): print('x' * 1000)\nprint('end')", b"", 60.0)
    assert (outcome.ended, len(outcome.output)) == ("output", LIMITS.output)


def test_a_worker_that_is_killed_leaves_no_program(sandbox):
    """The program ends with the process that started it; its control group goes when the run ends."""
    token = f"300.{os.getpid()}7731"
    child = os.fork()
    if child == 0:
        program = f"import subprocess\nsubprocess.run(['sleep', '{token}'])"
        dataclasses.replace(sandbox, prefix=f"{PREFIX}{os.getpid()}").run(program, b"", 60.0)
        os._exit(0)
    deadline = time.monotonic() + 60
    while not runs_with(token):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    while runs_with(token):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    if sandbox.groups is not None:
        folders = {sandbox.groups.memory, sandbox.groups.pids}
        while any(list(folder.glob(f"{PREFIX}{child}-*")) for folder in folders):
            assert time.monotonic() < deadline
            remove_left_groups(sandbox.groups)
            time.sleep(0.02)


def test_without_bwrap_code_rewards_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with (
        pytest.raises(ConfigError, match="'code': code rewards need bwrap, which is not in PATH; install bubblewrap"),
        RewardScorer([spec_from({"kind": "code"})], tmp_path, 1, 100),
    ):
        pass


def test_root_without_control_groups_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(bwrap.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(bwrap.os, "geteuid", lambda: 0)
    monkeypatch.setattr(bwrap, "writable_groups", lambda: None)
    with (
        pytest.raises(ConfigError, match="as root only in control groups"),
        RewardScorer([spec_from({"kind": "code"})], tmp_path, 1, 100),
    ):
        pass


def test_more_memory_than_the_machine_has_is_refused(monkeypatch):
    monkeypatch.setattr(bwrap.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(bwrap.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(bwrap, "free_memory", lambda: 2**30)
    monkeypatch.setattr(bwrap, "writable_groups", lambda: None)
    with pytest.raises(ConfigError, match=r"1\.1 GiB of memory \(2 programs at a time of 96 MiB for each of 6 proc"):
        open_bwrap(LIMITS, interpreter_at(""), "x", 2)
    monkeypatch.setattr(bwrap, "writable_groups", lambda: GroupFolders(Path("/a"), Path("/a")))
    assert open_bwrap(LIMITS, interpreter_at(""), "x", 2).limits == LIMITS


def test_groups_are_looked_for_from_this_process_upwards(tmp_path, monkeypatch):
    """In version 2 of control groups, a group with processes has no groups with limits below it."""
    own, mount, tried = tmp_path / "cgroup", tmp_path / "mount", []
    monkeypatch.setattr(control_groups, "_works", lambda folders: tried.append(folders))
    assert writable_groups(own, mount) is None
    own.write_text("0::/user/run\n")
    assert writable_groups(own, mount) is None
    assert tried == []
    (mount / "user" / "run").mkdir(parents=True)
    (mount / "cgroup.controllers").write_text("memory pids\n")
    assert writable_groups(own, mount) is None
    places = [mount / "user" / "run", mount / "user", mount]
    assert tried == [GroupFolders(place, place) for place in places]
    monkeypatch.setattr(control_groups, "_works", lambda folders: folders.memory.name == "user")
    assert writable_groups(own, mount).memory == mount / "user"


def test_groups_of_version_1_have_two_halves(tmp_path, monkeypatch):
    own, mount = tmp_path / "cgroup", tmp_path / "mount"
    monkeypatch.setattr(control_groups, "_works", lambda folders: True)
    own.write_text("8:pids:/\n4:memory:/a\n0::/\n")
    (mount / "memory" / "a").mkdir(parents=True)
    (mount / "pids").mkdir()
    assert writable_groups(own, mount) == GroupFolders(mount / "memory" / "a", mount / "pids")
    own.write_text("8:pids:/\n0::/\n")
    assert writable_groups(own, mount) is None


@pytest.mark.parametrize("version", [1, 2])
def test_a_group_bounds_memory_without_swap_and_processes(tmp_path, version):
    swap = tmp_path / ("memory.swap.max" if version == 2 else "memory.memsw.limit_in_bytes")
    swap.write_text("max")
    control_groups._limit(tmp_path, tmp_path, version, 1000, 7)
    memory = "memory.max" if version == 2 else "memory.limit_in_bytes"
    texts = {name: (tmp_path / name).read_text() for name in (memory, swap.name, "pids.max")}
    assert texts == {memory: "1000", swap.name: "0" if version == 2 else "1000", "pids.max": "7"}


def test_a_folder_without_limits_is_no_place_for_groups(tmp_path, monkeypatch):
    """A folder of an ordinary disk takes the files, and cannot be removed with them."""
    monkeypatch.setattr(control_groups, "_END_S", 0.0)
    assert not control_groups._works(GroupFolders(tmp_path, tmp_path))
    assert not control_groups._works(GroupFolders(tmp_path / "none", tmp_path / "none"))


def test_an_interpreter_in_the_home_folder_itself_is_refused(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="cannot be run"):
        interpreter_at(str(tmp_path / "python"))
    monkeypatch.setattr(Path, "home", lambda: Path(sys.base_prefix) / "home")
    if not sys.base_prefix.startswith("/usr"):
        with pytest.raises(ConfigError, match="has your home folder in it"):
            interpreter_at("")


def test_a_filter_exists_for_two_kinds_of_processors():
    assert filter_program("riscv64") is None
    for machine in ("x86_64", "aarch64"):
        program = filter_program(machine)
        assert len(program) % 8 == 0
        assert program[-8:-4] == b"\x06\0\0\0"  # it ends with a return
