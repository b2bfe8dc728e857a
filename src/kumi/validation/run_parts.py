"""Run the parts of the validation, each in a process of its own, and write the report after each.

    validate --Popen--> python -m kumi.validation.part_process   writes a line of JSON for each row
             after each part: gpu-report.json and gpu-report.md, without private words (`shareable`)

A part that crashes, hangs or fails costs its own remaining rows. All parts together take at most `SECONDS`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kumi import __version__
from kumi.files.output import make_folder, replace_text
from kumi.launch.local import rank_environment
from kumi.launch.standing import without_launcher
from kumi.validation.part import Part, Row, Setting, Status
from kumi.validation.part_table import PARTS
from kumi.validation.shareable import frames_in, private_here, shareable
from kumi.validation.validation_page import page

# By device: the seconds for all parts together, and the factor of each part's own limit. A CPU, which only tries the
# parts, may be slow and busy.
SECONDS = {"cuda": 480.0, "cpu": 2400.0}
_LIMIT_FACTORS = {"cuda": 1.0, "cpu": 4.0}
JSON_FILE, PAGE_FILE = "gpu-report.json", "gpu-report.md"
# Seconds to spend on one figure, by device.
_FIGURE = {"cuda": 1.0, "cpu": 0.05}
# A process that hangs gets SIGABRT, and has this long to print its stack.
_LAST_WORDS_SECONDS = 2.0
# With less time than this left, no part is started: it would hardly have imported torch.
_LEAST_SECONDS = 5.0

Show = Callable[[str], None]


@dataclass
class PartResult:
    """What became of a part.

    `needs`: what the part is for. `where`: the places of an exception or a crash, the innermost last.
    """

    name: str
    needs: str
    status: Status
    reason: str = ""
    seconds: float = 0.0
    where: list[str] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)


@dataclass
class Report:
    """The results, as far as they go. `device`: cuda or cpu. `complete`: no part is missing."""

    device: str
    kumi: str = __version__
    seconds: float = 0.0
    complete: bool = False
    parts: list[PartResult] = field(default_factory=list)


def validate(
    out: Path,
    device: str,
    *,
    parts: Sequence[Part] | None = None,
    seconds: float | None = None,
    environ: Mapping[str, str] | None = None,
    show: Show = lambda line: None,
) -> dict[str, Any]:
    """Run `parts` (default: all) on `device` (cuda or cpu). Return the report, which is in `out` as two files.

    `seconds`: for all of them, by default `SECONDS`.
    `environ`: the variables of the processes; `show`: receives a line for each part. Raise RefusedError if `out` is a
    link, and OSError if it cannot be written.
    """
    parts, factor = PARTS if parts is None else parts, _LIMIT_FACTORS[device]
    seconds = SECONDS[device] if seconds is None else seconds
    variables = dict(os.environ if environ is None else environ)
    private, report, began = private_here(variables), Report(device), time.monotonic()
    written: dict[str, Any] = {}
    make_folder(out)
    for part in parts:
        # The last part compares the end with the beginning, so its time is kept for it.
        left = seconds - (time.monotonic() - began) - (0.0 if part is parts[-1] else factor * parts[-1].seconds)
        if left < _LEAST_SECONDS:
            result = PartResult(part.name, part.needs, "left out", f"the {seconds:.0f} s for all parts were spent")
        else:
            result = _run(part, Setting(device, _FIGURE[device]), variables, min(left, factor * part.seconds))
        report.parts.append(result)
        report.seconds, report.complete = round(time.monotonic() - began, 1), len(report.parts) == len(parts)
        written = shareable(asdict(report), private)
        replace_text(out / JSON_FILE, json.dumps(written, indent=1) + "\n")
        replace_text(out / PAGE_FILE, page(written))
        last = written["parts"][-1]
        show(f"{part.name:<18} {last['status']:<9} {last['seconds']:6.1f} s  {last['reason']}".rstrip())
    return written


def _run(part: Part, setting: Setting, environ: Mapping[str, str], limit: float) -> PartResult:
    """Run `part` in a process for at most `limit` seconds."""
    began = time.monotonic()
    with TemporaryDirectory(prefix="kumi-gpu-") as folder:
        lines, errors = Path(folder) / "rows", Path(folder) / "errors"
        lines.touch()
        with errors.open("wb") as stream:
            process = subprocess.Popen(
                [sys.executable, "-X", "faulthandler", "-m", "kumi.validation.part_process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=stream,
                cwd=folder,
                env=_variables(environ, setting, folder),
                start_new_session=True,
            )
            late = _wait(process, json.dumps([part.function, asdict(setting), str(lines)]), limit)
        stderr = errors.read_bytes().decode(errors="replace")
        result = _result(part, lines.read_bytes().splitlines(), process.returncode, stderr, limit if late else None)
    result.seconds = round(time.monotonic() - began, 1)
    return result


def _variables(environ: Mapping[str, str], setting: Setting, folder: str) -> dict[str, str]:
    """Return the variables of a part's process: those of a rank, with this kumi's code and a folder of its own."""
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join([root, *filter(None, [environ.get("PYTHONPATH")])])
    hidden = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""} if setting.device == "cpu" else {}
    environ = without_launcher(environ)
    return {**rank_environment(1, environ), **environ, "PYTHONPATH": path, "TMPDIR": folder, **hidden}


def _wait(process: subprocess.Popen[bytes], request: str, limit: float) -> bool:
    """Send `request` to `process` and wait until it has ended with all processes of its session.

    Return True if it had to be stopped after `limit` seconds.
    """
    late = False
    try:
        process.communicate(request.encode(), timeout=limit)
    except subprocess.TimeoutExpired:
        late = True
        process.send_signal(signal.SIGABRT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_LAST_WORDS_SECONDS)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # the compiler's workers and ranks, too
        process.wait()
    return late


def _result(part: Part, lines: Sequence[bytes], code: int, stderr: str, limit: float | None) -> PartResult:
    """Return the result in the `lines` that the process wrote.

    `code`: the exit code, negative for a signal. `stderr`: what it wrote to standard error.
    `limit`: the seconds after which it was stopped; None if it ended in time.
    """
    result = PartResult(part.name, part.needs, "crashed")
    ended = False
    for line in lines:
        try:
            entry = json.loads(line)
        except ValueError:  # cut off by the end of the process
            continue
        if "row" in entry:
            result.rows.append(entry["row"])
        else:
            ended, result.status, result.reason = True, entry["status"], entry["reason"]
            result.where = frames_in(entry["traceback"])
    if not ended:
        result.where = frames_in(stderr)[::-1]
        result.reason = f"the process ended by {_signal(code)}" if code < 0 else f"the process ended with code {code}"
    if limit is not None and not ended:
        result.status, result.reason = "late", f"it took longer than its {limit:.0f} s, and was stopped"
    return result


def _signal(code: int) -> str:
    with suppress(ValueError):
        return signal.Signals(-code).name
    return f"signal {-code}"
