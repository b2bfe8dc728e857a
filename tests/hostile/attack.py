"""Let kumi read hostile files, each in a process of its own that is watched; print one line of JSON for each.

python attack.py FOLDER COUNT [KIND ...]

A process is forked from this one, which has imported everything, so what is measured is the reading alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import signal
import sys
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import kinds
import torch
from damage import Mutant, Special, mutants

from kumi.errors import KumiError, ModelError

_RUNS = (
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.spawn",
    "os.fork",
    "subprocess.Popen",
    "socket.connect",
    "pickle.find_class",
    "os.startfile",
    "pty.spawn",
)
_OWN = (
    os.path.realpath(sys.prefix),
    os.path.realpath(sys.base_prefix),
    os.path.realpath(Path(kinds.families.__file__).parents[3]),
)
_SYSTEM = ("/proc/", "/sys/", "/dev/null", "/dev/urandom", "/etc/localtime", "/usr/lib", "/usr/share/zoneinfo")


def main(root: Path, count: int, names: list[str]) -> None:
    """Read `count` mutants of every kind in `names`, or of all kinds."""
    torch.set_num_threads(1)
    (root / "secret.json").write_text(json.dumps(kinds.CONFIG))
    made = kinds.make(root / "good")
    for kind in made:
        if names and kind.name not in names:
            continue
        with contextlib.suppress(ModelError):  # weights that are pickled are always refused
            kind.read(root / "good")  # which imports its modules
        file = root / "good" / kind.file
        good = file.read_bytes()
        for number, mutant in enumerate(mutants(kind.name, good, count)):
            _put(file, mutant, root, 10**8 if kind.file.startswith("data.") else 2**40)
            print(json.dumps({"kind": kind.name, "number": number} | _watched(kind, root)), flush=True)
        _put(file, good, root)


def _put(file: Path, mutant: Mutant, root: Path, large: int = 0) -> None:
    """Put `mutant` in the place of `file`; a sparse one has `large` bytes."""
    if file.is_dir() and not file.is_symlink():
        shutil.rmtree(file)
    file.unlink(missing_ok=True)
    if not isinstance(mutant, Special):
        file.write_bytes(mutant)
    elif mutant.kind == "link":
        file.symlink_to(root / "secret.json")
    elif mutant.kind == "device":
        file.symlink_to("/dev/zero")
    elif mutant.kind == "pipe":
        os.mkfifo(file)
    elif mutant.kind == "folder":
        file.mkdir()
    else:
        with file.open("wb") as sparse:
            sparse.truncate(large)


def _watched(kind: kinds.Kind, root: Path) -> dict:
    """Return the outcome of reading the file of `kind`, in a child process."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        with os.fdopen(writer, "w") as answer:
            json.dump(_attempt(kind, root), answer)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as answer:
        text = answer.read()
    _, status, used = os.wait4(child, 0)
    verdict = json.loads(text) if text else {"verdict": f"killed by signal {status & 127}", "reason": "", "outside": []}
    return verdict | {"seconds": round(used.ru_utime + used.ru_stime, 3)}


def _attempt(kind: kinds.Kind, root: Path) -> dict:
    """Read the file; verdict "accepted", "refused", or the traceback."""
    resource.setrlimit(resource.RLIMIT_CPU, (20, 20))
    signal.alarm(60)
    outside: list[str] = []
    home = os.path.realpath(root / "good") + os.sep
    may_read = (home, *_SYSTEM, *_OWN, *([str(root / "secret.json")] if kind.named else []))

    def note(event: str, arguments: tuple) -> None:
        if event.startswith(_RUNS):
            outside.append(f"{event} {arguments!r:.100}")
        elif event == "open" and isinstance(arguments[0], str | bytes):
            path, flags = os.path.realpath(os.fsdecode(arguments[0])), arguments[2] or 0
            writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) and path != "/dev/null"
            if writes or not path.startswith(may_read):
                outside.append(f"{path} {flags:o}")
        elif event == "exec":
            code = arguments[0].co_filename
            if not code.startswith("<frozen") and not os.path.realpath(code).startswith(_OWN):
                outside.append(f"exec {code}")

    before, begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    sys.addaudithook(note)
    verdict, reason = "accepted", ""
    try:
        with contextlib.redirect_stdout(None), contextlib.redirect_stderr(None):
            kind.read(root / "good")
    except KumiError as error:
        verdict, reason = "refused", str(error)
    except BaseException as error:
        verdict, reason = "traceback", "".join(traceback.format_exception(error))[-1500:]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {
        "verdict": verdict,
        "reason": reason[:1500],
        "length": len(reason),
        "outside": outside[:3],
        "mib": peak // 1024,
        "wall": round(time.perf_counter() - begin, 3),
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
