"""The self-test of a sandbox at the start of a run: programs that try to get out of it, in ways that do no harm.

They look for things that this process made for them: a listener, a file, a sleeping child. They go one step over a
limit: one process, one page, one byte.
"""

from __future__ import annotations

import os
import secrets
import select
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

from kumi.errors import ConfigError
from kumi.rewards.sandbox.bwrap import NOBODY, BwrapSandbox, last_line
from kumi.rewards.sandbox.program_run import Outcome

# Seconds for a probe that ends by itself, on a busy machine; and for the probe that must be ended.
_TIMEOUT_S, _SHORT_S = 60.0, 0.5
_PAGE = 4096
# What a probe prints when it gets out.
_ESCAPED = b"escaped"


def check_isolation(sandbox: BwrapSandbox) -> None:
    """Raise ConfigError if `sandbox` cannot run a program, or if a probe gets out of it."""
    token = secrets.token_hex(16)
    try:
        outcome = sandbox.run("print(input())", token.encode() + b"\n", _TIMEOUT_S)
        reason = f"a program ends with code {outcome.code}: {last_line(outcome.errors)}"
        works = outcome.output.strip() == token.encode()
    except OSError as error:
        reason, works = str(error), False
    if not works:
        raise ConfigError(
            f"code rewards cannot run on this machine: {reason}; allow user namespaces, name another interpreter with "
            "the key `python`, or your own sandbox service with the key `service`"
        )
    for reach, probe in _PROBES.items():
        escape = probe(sandbox)
        if escape:
            raise ConfigError(
                f"code rewards are refused: in the self-test of the sandbox, a program {escape} ({reach}); correct the "
                "machine's settings, or name your own sandbox service with the key `service`"
            )


def _incomplete(outcome: Outcome) -> str | None:
    """Return a phrase after "a program" if a probe did not run to its end, and so shows nothing; None if it did."""
    if b"done" in outcome.output:
        return None
    return f"ended with code {outcome.code}, so that nothing is known about it: {last_line(outcome.errors)}"


def _network(sandbox: BwrapSandbox) -> str | None:
    name = f"\0kumi-{secrets.token_hex(8)}"
    with socket.create_server(("127.0.0.1", 0)) as port, socket.socket(socket.AF_UNIX) as local:
        local.bind(name)
        local.listen()
        addresses = [("AF_INET", port.getsockname()), ("AF_UNIX", name)]
        outcome = sandbox.run(
            f"""
import socket
for family, address in {addresses!r}:
    with socket.socket(getattr(socket, family)) as client:
        client.settimeout(2)
        try:
            client.connect(address)
        except OSError:
            continue
        print("escaped")
print("done")
""",
            b"",
            _TIMEOUT_S,
        )
        arrived, _, _ = select.select([port, local], [], [], 0)
    if arrived or _ESCAPED in outcome.output:
        return "connects to a listener outside of it"
    return _incomplete(outcome)


def _files(sandbox: BwrapSandbox) -> str | None:
    token = secrets.token_hex(16)
    with ExitStack() as stack:
        folders = [stack.enter_context(folder) for folder in _canary_folders()]
        canaries = [folder / "canary" for folder in folders]
        for canary in canaries:
            canary.parent.chmod(0o755)
            canary.write_text(token)
            canary.chmod(0o644)
        outcome = sandbox.run(
            f"""
for path in {[str(canary) for canary in canaries]!r}:
    try:
        print(open(path).read())
    except OSError:
        pass
    try:
        open(path + "-written", "w").close()
    except OSError:
        pass
print("done")
""",
            b"",
            _TIMEOUT_S,
        )
        written = any(canary.with_name("canary-written").exists() for canary in canaries)
    if token.encode() in outcome.output:
        return "reads a file outside of it"
    return "writes a file outside of it" if written else _incomplete(outcome)


def _canary_folders() -> Iterator[AbstractContextManager[Path]]:
    """Yield a new folder among temporary files and, if the home folder can be written, one in it."""
    yield _new_folder(None)
    home = Path.home()
    if os.access(home, os.W_OK):
        yield _new_folder(home)


@contextmanager
def _new_folder(parent: Path | None) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix=".kumi-canary-", dir=parent) as folder:
        yield Path(folder)


def _processes(sandbox: BwrapSandbox) -> str | None:
    # Digits that no other process has in its command line, as decimals of the seconds that `sleep` takes.
    token = str(secrets.randbelow(10**15) + 10**15)
    other = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}
    with subprocess.Popen(["sleep", f"300.{token}"], stdin=subprocess.DEVNULL, cwd="/", **other) as child:  # type: ignore[call-overload]
        try:
            outcome = sandbox.run(
                f"""
import os
for name in filter(str.isdigit, os.listdir("/proc")):
    try:
        if {token!r} in open(f"/proc/{{name}}/cmdline").read():
            print("escaped: sees")
    except OSError:
        pass
try:
    os.kill({child.pid}, 0)
    # A process of the sandbox may have the same number.
    if not os.path.exists("/proc/{child.pid}"):
        print("escaped: signals")
except OSError:
    pass
print("done")
""",
                b"",
                _TIMEOUT_S,
            )
        finally:
            child.kill()
    if _ESCAPED in outcome.output:
        return f"{'sees' if b'sees' in outcome.output else 'signals'} a process outside of it"
    return _incomplete(outcome)


def _privileges(sandbox: BwrapSandbox) -> str | None:
    outcome = sandbox.run(
        """
import ctypes, os
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
new_user = 0x10000000
if ctypes.CDLL(None).unshare(new_user) == 0:
    print("escaped")
if os.getuid() == 0 or int(status["CapEff"], 16) or status["NoNewPrivs"].strip() != "1":
    print("escaped")
print("done")
""",
        b"",
        _TIMEOUT_S,
    )
    return "has privileges" if _ESCAPED in outcome.output else _incomplete(outcome)


def _forks(sandbox: BwrapSandbox) -> str | None:
    limit = sandbox.limits.processes
    outcome = sandbox.run(
        f"""
import os, time
forks = 0
for _ in range({limit} + 1):
    try:
        if os.fork() == 0:
            time.sleep(300)
            os._exit(0)
    except OSError:
        break
    forks += 1
# The program's first process counts, too.
print("escaped" if forks >= {limit} else "held", "done")
""",
        b"",
        _TIMEOUT_S,
    )
    if _ESCAPED in outcome.output:
        return f"starts more than {limit} processes"
    return "is not ended with its processes" if outcome.ended else _incomplete(outcome)


def _memory(sandbox: BwrapSandbox) -> str | None:
    size = sandbox.limits.memory + _PAGE
    outcome = sandbox.run(
        f"""
block = bytearray({size})
for start in range(0, {size}, {_PAGE}):
    block[start] = 1
print("escaped")
""",
        b"",
        _TIMEOUT_S,
    )
    return f"has more than {sandbox.limits.memory} bytes of memory" if _ESCAPED in outcome.output else None


def _written_files(sandbox: BwrapSandbox) -> str | None:
    size, name = sandbox.limits.files + _PAGE, f"kumi-{secrets.token_hex(8)}"
    outcome = sandbox.run(
        f"""
import os
for folder in ("/tmp", "/dev/shm"):
    handle, total = os.open(f"{{folder}}/{name}", os.O_CREAT | os.O_EXCL | os.O_WRONLY), 0
    try:
        while total < {size}:
            total += os.write(handle, bytes(min({size} - total, 1 << 20)))
        print("escaped")
    except OSError:
        pass
    finally:
        os.close(handle)
        os.unlink(f"{{folder}}/{name}")
if any(os.access(folder, os.W_OK) for folder in ("/", "/dev", "/usr", "/program")):
    print("escaped")
print("done")
""",
        b"",
        _TIMEOUT_S,
    )
    return (
        f"writes more than {sandbox.limits.files} bytes of files"
        if _ESCAPED in outcome.output
        else _incomplete(outcome)
    )


def _output(sandbox: BwrapSandbox) -> str | None:
    size = sandbox.limits.output + 1
    outcome = sandbox.run(f"import time\nprint('x' * {size}, flush=True)\ntime.sleep(300)", b"", _TIMEOUT_S)
    over = len(outcome.output) > sandbox.limits.output or outcome.ended != "output"
    return f"prints more than {sandbox.limits.output} bytes" if over else None


def _time(sandbox: BwrapSandbox) -> str | None:
    outcome = sandbox.run("import time\ntime.sleep(300)", b"", _SHORT_S)
    return None if outcome.ended == "time" else f"is not ended after {_SHORT_S:g} s"


def _left_over(sandbox: BwrapSandbox) -> str | None:
    outcome = sandbox.run(
        """
import os, time
try:
    child = os.fork()
except OSError:
    child = 1
if child == 0:
    time.sleep(300)
print("done")
""",
        b"",
        _TIMEOUT_S,
    )
    return "leaves a process behind" if outcome.ended else _incomplete(outcome)


# What a probe reaches for -> the probe: it returns how it got out, as a phrase after "a program", or None.
_PROBES: dict[str, Callable[[BwrapSandbox], str | None]] = {
    "network": _network,
    "files": _files,
    "processes": _processes,
    "privileges": _privileges,
    "number of processes": _forks,
    "memory": _memory,
    "written files": _written_files,
    "output": _output,
    "time": _time,
    "processes at its end": _left_over,
}
