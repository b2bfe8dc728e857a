"""kumi, the bare loop and torchtitan on one GPU: the GPU tests, then speed and memory of Llama-3.2-1B and Llama-3.1-8B
shapes and of experts like Qwen3-30B-A3B's; layouts where there are several GPUs.

    python benchmarks/gpu.py [--budget 460] [--out FILE] [--only TEXT] [--device cpu --tiny]

Cases that do not fit the free memory have fewer layers, a smaller vocabulary or fewer tokens: any card from 16 GB will
do. Each case runs in a new process with a time limit, the most important cases first; cases beyond the time budget are
listed. The JSON file is rewritten after each case, so that no measurement is lost. Needs no network.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

HERE = Path(__file__).parent
ROOT = HERE.parent
if find_spec("kumi") is None:
    sys.path.insert(0, str(ROOT / "src"))

import gpu_cases  # noqa: E402  (kumi's sources may be its only copy here)
import machine  # noqa: E402
from gpu_cases import Case  # noqa: E402

NEEDED = ("torch", "numpy", "pydantic", "rich", "safetensors", "tokenizers", "tomli_w")
LATE = 124  # as of the program `timeout`
CASE_LIMIT, TEST_LIMIT = 100.0, 200.0
MEASURED = 3.0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=" ".join(__doc__.split("\n\n")[0].split()), allow_abbrev=False)
    parser.add_argument("--budget", type=float, default=460.0, help="seconds for everything")
    parser.add_argument("--out", type=Path, help="JSON file; by default benchmarks/results/gpu_<device>_<time>.json")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name contains TEXT")
    parser.add_argument("--no-tests", action="store_true", help="leave out pytest tests/gpu")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes: tries the script, measures nothing of use")
    return parser.parse_args()


def check_packages() -> dict[str, str]:
    """Return the systems that cannot run here, with reasons. Raise SystemExit if kumi itself cannot."""
    absent = [name for name in NEEDED if find_spec(name) is None]
    if absent:
        packages = " ".join(name.replace("_", "-") for name in absent)
        raise SystemExit(f"kumi needs packages that are not installed here: pip install {packages}")
    reasons = {
        ("amp", "bf16"): None if find_spec("transformers") else "transformers not installed: pip install transformers",
        ("titan", "titan-fsdp"): why_no_titan(),
    }
    return {system: reason for systems, reason in reasons.items() if reason for system in systems}


def why_no_titan() -> str | None:
    """Return why torchtitan cannot be measured here; None if it can."""
    install = "pip install torchtitan==0.2.2"
    absent = [name for name in ("torchtitan", "torchdata", "tyro") if find_spec(name) is None]
    if absent:
        return f"{', '.join(absent)} not installed: {install}"
    installed = version("torchtitan")
    return None if installed.startswith("0.2.") else f"written for torchtitan 0.2, and {installed} is here: {install}"


def python(*args: str, limit: float, ranks: int = 1) -> subprocess.CompletedProcess[str]:
    """Run a Python process with kumi on its path, or `ranks` of them as a group.

    Return the first one that failed, else the first; with the code `LATE` if they took longer than `limit` seconds.
    """
    code = f"import sys, runpy; sys.path[:0] = {[str(HERE), str(ROOT / 'src')]}; sys.argv = sys.argv[1:]; "
    code += "runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"
    env = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    command = [sys.executable, "-c", code, *args]
    until, shared = time.monotonic() + limit, {} if ranks == 1 else group_environment(ranks)
    with ExitStack() as stack, TemporaryDirectory() as folder:
        files = [Path(folder) / f"{rank}.{name}" for rank in range(ranks) for name in ("out", "err")]
        pipes = [stack.enter_context(file.open("w")) for file in files]
        started = [
            subprocess.Popen(
                command,
                env=env | shared | ({"RANK": str(rank), "LOCAL_RANK": str(rank)} if shared else {}),
                cwd=ROOT,
                start_new_session=True,
                stdout=pipes[2 * rank],
                stderr=pipes[2 * rank + 1],
            )
            for rank in range(ranks)
        ]
        in_time = wait_for_all(started, until)
        done = [
            subprocess.CompletedProcess(command, process.returncode, *(file.read_text() for file in pair))
            for process, pair in zip(started, zip(files[::2], files[1::2], strict=True), strict=True)
        ]
    # A rank that was killed after another failed does not tell the reason.
    first = next((one for one in done if one.returncode > 0), done[0])
    return first if in_time else subprocess.CompletedProcess(command, LATE, first.stdout, first.stderr)


def group_environment(ranks: int) -> dict[str, str]:
    """Return the environment variables with which processes on this machine form a group."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}


def wait_for_all(started: list[subprocess.Popen], until: float) -> bool:
    """Wait for processes, killing all if one fails; return True if they ended before `until`."""
    while time.monotonic() < until and any(process.poll() is None for process in started):
        if any(process.poll() for process in started):
            break
        time.sleep(0.05)
    in_time = time.monotonic() < until
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # the compiler's worker processes, too
        process.wait()
    return in_time


def run_tests(limit: float) -> dict:
    """Run `pytest tests/gpu`; return its status and the end of its output."""
    if find_spec("pytest") is None:
        return {"status": "not run", "reason": "pytest is not installed: pip install pytest hypothesis"}
    began = time.monotonic()
    done = python(
        "pytest",
        "tests/gpu",
        "-v",
        "--durations=10",
        "--maxfail=20",
        "-W",
        "default",
        "-p",
        "no:cacheprovider",
        limit=limit,
    )
    if done.returncode == LATE:
        return {"status": "out of time", "reason": f"took longer than {limit:.0f} s", "output": done.stdout[-3000:]}
    status = {0: "passed", 5: "no tests"}.get(done.returncode, "failed")
    return {"status": status, "seconds": time.monotonic() - began, "output": done.stdout[-3000:]}


def run_case(case: Case, device: str, limit: float, devices: int = 1) -> dict:
    """Return the measurement of benchmarks/gpu_case.py on some of the `devices`, or the reason why there is none."""
    if case.ranks > devices:
        return {"status": "skipped", "reason": f"takes {case.ranks} devices, and there are {devices}"}
    with TemporaryDirectory() as folder:
        out = Path(folder) / "case.json"
        seconds = str(MEASURED if device == "cuda" else 0.1)
        options = [json.dumps(asdict(case)), str(out), "--device", device, "--seconds", seconds]
        done = python("gpu_case", *options, limit=limit, ranks=case.ranks)
        if done.returncode == LATE:
            return {"status": "out of time", "reason": f"took longer than {limit:.0f} s"}
        if done.returncode != 0:
            return {"status": "failed", "reason": done.stderr[-1500:]}
        return json.loads(out.read_text())


def run_cases(
    cases: list[Case],
    run_one: Callable[[Case, float], dict],
    *,
    skipped: dict[str, str],
    left: Callable[[], float],
    save: Callable[[dict], None],
) -> None:
    """Run `cases` in order while `left()` seconds remain; call `save` with the entry of every case, run or not."""
    slowest = 0.0
    for case in cases:
        entry = {"name": case.name, **asdict(case), "ranks": case.ranks}
        began = left()
        if case.system in skipped:
            save(entry | {"status": "skipped", "reason": skipped[case.system]})
        elif began < max(10.0, slowest / 2):
            save(entry | {"status": "left out", "reason": "the time budget was spent"})
        else:
            save(entry | run_one(case, min(CASE_LIMIT, began)))
            slowest = max(slowest, began - left())


def describe_device(device: str) -> dict:
    """Return the machine, and on CUDA the GPU with its data-sheet peak and the measured rate of a large bf16 matmul."""
    description = machine.describe() | {"device": "cpu"}
    if device == "cuda":
        done = python("gpu_device", limit=120)
        if done.returncode != 0:
            answer = "nothing within 120 s" if done.returncode == LATE else done.stderr[-1500:]
            raise SystemExit(f"no CUDA device answers (use --device cpu --tiny to try the script): {answer}")
        description |= json.loads(done.stdout.splitlines()[-1])
    return description


def table_line(entry: dict, peak: float | None) -> str:
    """Return one line of the table."""
    if entry["status"] != "ok":
        return f"{entry['name']:<52} {entry['status']}: {entry.get('reason', '').strip().splitlines()[-1][:80]}"
    mfu = f"{100 * entry['flops_per_s'] / peak / entry.get('ranks', 1):5.1f}" if peak else "  n/a"
    memory = f"{entry['peak_bytes'] / 2**30:7.1f}" if entry["peak_bytes"] else "    n/a"
    estimate = f"{entry['estimated_bytes'] / 2**30:7.1f}" if entry["estimated_bytes"] else "      -"
    low, high = entry["step_s_range"]
    return (
        f"{entry['name']:<52} {entry['tokens_per_s']:9.0f} tok/s {mfu} % MFU {memory} GiB (estimated {estimate}) "
        f"step {low:.4f}-{high:.4f} s"
    )


def result_file(description: dict) -> Path:
    """Return a new path under benchmarks/results, named after the device and the day."""
    name = "".join(letter if letter.isalnum() else "-" for letter in description["device"].lower())
    return HERE / "results" / f"gpu_{name}_{datetime.now(UTC):%Y-%m-%d_%H%M}.json"


def main() -> None:
    began, args = time.monotonic(), arguments()
    skipped = check_packages()
    device_description = describe_device(args.device)
    out = args.out or result_file(device_description)
    out.parent.mkdir(parents=True, exist_ok=True)
    result = {
        "machine": device_description,
        "budget_s": args.budget,
        "tiny": args.tiny,
        "tests": {"status": "not run"},
        "cases": [],
    }

    def left() -> float:
        return args.budget - (time.monotonic() - began)

    def save(entry: dict) -> None:
        result["cases"].append(entry)
        result["seconds"] = time.monotonic() - began
        out.write_text(json.dumps(result, indent=1) + "\n")
        print(table_line(entry, device_description.get("peak_flops")), flush=True)

    if not args.no_tests:
        result["tests"] = run_tests(min(TEST_LIMIT, left()))
        print(f"tests/gpu {result['tests']['status']}\n{result['tests'].get('output', '')[-800:]}", flush=True)
    cases = [gpu_cases.tiny(case) if args.tiny else case for case in gpu_cases.all_cases()]
    cases = [case for case in cases if args.only in case.name]
    devices = device_description.get("devices", os.cpu_count())

    def run_one(case: Case, limit: float) -> dict:
        return run_case(case, args.device, limit, devices)

    run_cases(cases, run_one, skipped=skipped, left=left, save=save)
    print(f"{time.monotonic() - began:.0f} s; written to {out}")


if __name__ == "__main__":
    main()
