"""Programs in bubblewrap: no network, no home, no other processes, and limits on all that they use.

A program sees the system's programs and libraries, its interpreter, and two empty folders in memory, /tmp and /dev/shm.
It has an unprivileged uid, no capability and no way to another namespace (`syscall_filter`). When it ends, its
processes end with it.

Memory and processes are bounded by a control group of the program's own. Without one, resource limits bound them: the
address space of each process and the number of processes, whose product then bounds the memory. If kumi runs as root,
the kernel does not count the processes of a uid, so that a control group is required.
"""

from __future__ import annotations

import os
import selectors
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from kumi.errors import ConfigError
from kumi.process_limits import free_memory
from kumi.rewards.sandbox.control_groups import GroupFolders, open_group, writable_groups
from kumi.rewards.sandbox.interpreter import Interpreter
from kumi.rewards.sandbox.program_run import Outcome, ProgramLimits
from kumi.rewards.sandbox.syscall_filter import filter_program

# The uid and gid of programs: "nobody", which owns no file.
NOBODY = 65534
# Processes of bwrap itself: the one outside, and the first of the new namespace.
_OWN_PROCESSES = 2
# Files that a process may have open.
_OPEN_FILES = 64
# Seconds for the pipes of a killed program to close.
_END_S = 10.0
# A remedy in error messages.
_SERVICE = "name your own sandbox service with the key `service`"

# A shell script that enters control groups, then becomes a command. Its arguments: the number of files to write to,
# these files, and the words of the command.
_ENTER = 'n=$1; shift; while [ "$n" -gt 0 ]; do echo 0 > "$1" || exit 125; shift; n=$((n - 1)); done; exec "$@"'


class SandboxError(OSError):
    """A failure of the sandbox itself, before the program began."""


@dataclass(frozen=True)
class BwrapSandbox:
    """Runs programs with `interpreter` within `limits`.

    bwrap: the path of bubblewrap.
    groups: the groups below which each program gets a control group of its own; None for resource limits.
    prefix: the first part of the names of the programs' groups.
    """

    bwrap: str
    limits: ProgramLimits
    interpreter: Interpreter
    groups: GroupFolders | None
    prefix: str

    def as_json(self) -> dict[str, Any]:
        """Return the fields as JSON data, for `sandbox_from` in another process."""
        groups = None if self.groups is None else [str(self.groups.memory), str(self.groups.pids)]
        return {**asdict(self), "groups": groups}

    def run(self, program: str, stdin: bytes, timeout_s: float) -> Outcome:
        """Run the Python source `program` for at most `timeout_s` seconds; return its outcome.

        Raise OSError if the program cannot be started.
        """
        with ExitStack() as stack:
            group = None
            if self.groups is not None:
                memory, processes = self.limits.memory, self.limits.processes + _OWN_PROCESSES
                group = stack.enter_context(open_group(self.groups, self.prefix, memory, processes))
            source, given, rules = (
                stack.enter_context(_file(raw)) for raw in (program.encode(errors="replace"), stdin, _filter())
            )
            entries = [] if group is None else [str(file) for file in group.entries]
            process = subprocess.Popen(
                ["/bin/sh", "-c", _ENTER, "sh", str(len(entries)), *entries, *self._command(source, rules, timeout_s)],
                stdin=given,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=(source.fileno(), rules.fileno()),
                cwd="/",
            )
            with process:
                outcome = _outcome(process, self.limits.output, timeout_s)
        if outcome.code and not outcome.output and outcome.errors.startswith(b"bwrap: "):
            raise SandboxError(f"bwrap cannot run a program: {last_line(outcome.errors)}")
        return outcome

    def _command(self, source: IO[bytes], rules: IO[bytes], timeout_s: float) -> Iterator[str]:
        """Yield the words of the command: bwrap, then the limits, then the interpreter."""
        root = os.geteuid() == 0
        yield from (self.bwrap, "--die-with-parent", "--new-session", "--clearenv")
        yield from ("--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try")
        # Without root's rights, only a user namespace allows the other namespaces. With root's rights there is no user
        # namespace: the program changes to another uid, which a user namespace with a single uid does not allow.
        yield from () if root else ("--unshare-user", "--uid", str(NOBODY), "--gid", str(NOBODY))
        variables = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0"}
        for name, value in variables.items():
            yield from ("--setenv", name, value)
        yield from _system_mounts()
        for folder in self.interpreter.folders:
            # bwrap would make the parents for the owner alone.
            for parent in reversed(Path(folder).parents[:-1]):
                yield from ("--perms", "0755", "--dir", str(parent))
            yield from ("--ro-bind", folder, folder)
        yield from ("--proc", "/proc", "--dev", "/dev")
        for folder in ("/dev/shm", "/tmp"):
            yield from ("--size", str(self.limits.files), "--perms", "1777", "--tmpfs", folder)
        yield from ("--perms", "0755", "--dir", "/program")
        yield from ("--perms", "0444", "--ro-bind-data", str(source.fileno()), "/program/main.py")
        yield from ("--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/tmp", "--seccomp", str(rules.fileno()))
        yield from ("--cap-drop", "ALL")
        if root:
            yield from ("--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID", "--")
            yield from ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--inh-caps=-all")
        yield from ("--",)
        yield from self._resource_limits(timeout_s)
        yield from (self.interpreter.path, "-s", "-B", "/program/main.py")

    def _resource_limits(self, timeout_s: float) -> Iterator[str]:
        """Yield the command that lowers the resource limits of each process. A limit of CPU time is in seconds."""
        yield from ("prlimit", f"--cpu={int(timeout_s) + 1}", f"--fsize={self.limits.files}", f"--nofile={_OPEN_FILES}")
        yield "--core=0"
        if self.groups is None:
            # bwrap's first process of the namespace is counted, too.
            yield from (f"--as={self.limits.memory}", f"--nproc={self.limits.processes + 1}")
        yield "--"


def open_bwrap(limits: ProgramLimits, interpreter: Interpreter, prefix: str, workers: int) -> BwrapSandbox:
    """Return the sandbox for programs within `limits`; `workers` of them run at a time.

    Raise ConfigError where bwrap or its limits cannot be had. `kumi.rewards.sandbox.probes` tests that no program gets
    out.
    """
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        raise ConfigError(f"code rewards need bwrap, which is not in PATH; install bubblewrap, or {_SERVICE}")
    if filter_program() is None:
        raise ConfigError(f"code rewards have no filter of system calls for this kind of processor; {_SERVICE}")
    groups = writable_groups()
    if groups is None and os.geteuid() == 0:
        raise ConfigError(
            "code rewards run as root only in control groups for memory and processes, and this process cannot make "
            f"them; run kumi as another user, or {_SERVICE}"
        )
    most = workers * limits.memory * (1 if groups else limits.processes)
    free = free_memory()
    if free is not None and most > free:
        raise ConfigError(
            f"code rewards may use {most / 2**30:.1f} GiB of memory ({workers} programs at a time of "
            f"{limits.memory / 2**20:.0f} MiB{'' if groups else f' for each of {limits.processes} processes'}), but "
            f"{free / 2**30:.1f} GiB are free; lower memory_mb{'' if groups else ' or processes'}, or use fewer workers"
        )
    return BwrapSandbox(bwrap, limits, interpreter, groups, prefix)


def sandbox_from(fields: Mapping[str, Any]) -> BwrapSandbox:
    """Return the sandbox whose `as_json` is `fields`."""
    groups = None if fields["groups"] is None else GroupFolders(*map(Path, fields["groups"]))
    limits, interpreter = ProgramLimits(**fields["limits"]), Interpreter(**fields["interpreter"])
    return BwrapSandbox(fields["bwrap"], limits, interpreter, groups, fields["prefix"])


def _system_mounts() -> Iterator[str]:
    """Yield the options for the programs and libraries of the system, read-only."""
    yield from ("--ro-bind", "/usr", "/usr")
    for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        path = Path("/") / name
        if path.is_symlink():
            yield from ("--symlink", os.readlink(path), str(path))
        elif path.is_dir():
            yield from ("--ro-bind", str(path), str(path))
    for name in ("ld.so.cache", "alternatives", "localtime"):
        yield from ("--ro-bind-try", f"/etc/{name}", f"/etc/{name}")


def _filter() -> bytes:
    """Return the filter of system calls for this machine."""
    rules = filter_program()
    assert rules is not None, "open_bwrap has checked the machine"
    return rules


def _file(content: bytes) -> IO[bytes]:
    """Return a file without a name that has `content`, to be read from its beginning."""
    file: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 -- the caller closes it
    file.write(content)
    file.seek(0)
    return file


def _outcome(process: subprocess.Popen[bytes], limit: int, timeout_s: float) -> Outcome:
    """Read the output of `process` until all of its processes have ended; kill it at a limit of output or time."""
    assert process.stdout
    assert process.stderr
    blocks: dict[IO[bytes], bytearray] = {process.stdout: bytearray(), process.stderr: bytearray()}
    deadline, ended = time.monotonic() + timeout_s, ""
    with selectors.DefaultSelector() as selector:
        for pipe in blocks:
            selector.register(pipe, selectors.EVENT_READ)
        while selector.get_map():
            events = selector.select(max(0.0, deadline - time.monotonic()))
            for key, _ in events:
                block = os.read(key.fd, 1 << 16)
                if not block:
                    selector.unregister(key.fileobj)
                elif not ended:
                    blocks[key.fileobj] += block  # type: ignore[index]
            too_much = any(len(block) > limit for block in blocks.values())
            if not ended and (too_much or time.monotonic() >= deadline):
                ended, deadline = "output" if too_much else "time", time.monotonic() + _END_S
                process.kill()
            elif ended and time.monotonic() >= deadline:
                break  # the processes are killed, but the kernel needs time, for example to write their pages
    with suppress(subprocess.TimeoutExpired):
        process.wait(_END_S)
    if process.returncode is None:
        process.kill()
    code = process.wait()
    output, errors = (bytes(block[:limit]) for block in blocks.values())
    return Outcome(128 - code if code < 0 else code, output, errors, ended)  # type: ignore[arg-type]


def last_line(errors: bytes) -> str:
    """Return the last line of a failed program's standard error, for a message."""
    lines = errors.decode(errors="replace").strip().splitlines()
    return lines[-1][:300] if lines else "it printed nothing"
