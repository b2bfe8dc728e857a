"""Compare the behaviour of two versions of kumi: plans, training runs, conversions and `--json` output.

    python tests/golden/golden.py make FILE.json [--source SRC] [--only plans ...]   # record the kumi in SRC
    python tests/golden/golden.py compare BEFORE.json AFTER.json
    python tests/golden/golden.py against COMMIT [--only plans ...]                  # record COMMIT and this folder

Kernels differ between machines, so no recording is committed: both sides are recorded on one machine. Numbers, keys,
codes and files are facts. Sentences are recorded apart, because they may be reworded. The exit code is 1 if facts
differ.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from golden_cases import PARTS, ROOT, Case, run_files

# Keys whose values differ between runs: only their presence is a fact.
MEASURED = re.compile(
    r"perf/(step_s|tokens_per_s|mfu)$|[. ]time/|mem/peak_bytes$|train_runtime$|cost\.(cpu_seconds|host_memory)$"
)
Recorded = dict[str, dict[str, dict[str, Any]]]


def make(source: Path, parts: list[str]) -> Recorded:
    """Run the cases of `parts` with the kumi in `source`; return case -> {"facts": ..., "sentences": ...}."""
    # Always the same folder, because its name is part of the recorded data and conversions.
    work = Path(tempfile.gettempdir()) / "kumi-golden"
    try:
        run_files(work)
    except FileExistsError:
        raise SystemExit(f"{work} exists: wait until the other run ends, or remove what it left behind") from None
    try:
        run = Runner(work, source)
        cases = {part: PARTS[part]() for part in PARTS}
        done: Recorded = {}
        # Plans are independent of each other. All other cases run in order; conversions and verbs need the runs.
        if "plans" in parts:
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                done |= dict(zip([case.name for case in cases["plans"]], pool.map(run, cases["plans"]), strict=True))
        if set(parts) - {"plans"}:
            for part in ("runs", "conversions", "verbs"):
                done |= {case.name: run(case) for case in cases[part] if part == "runs" or part in parts}
        return done
    finally:
        shutil.rmtree(work)


class Runner:
    """A runner of cases in one folder with one version of kumi."""

    def __init__(self, work: Path, source: Path) -> None:
        self._work = work
        self._places = {str(work): "{work}", str(ROOT): "{root}", str(source.parent): "{root}"}
        self._environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(work / "home"),
            "PYTHONPATH": str(source),
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "PASSIVE",
            "GLOO_SOCKET_IFNAME": "lo",
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
            "KUMI_NUMERICS": "reference",
            "COLUMNS": "100",
        }

    def __call__(self, case: Case) -> dict[str, dict[str, Any]]:
        words = [word.replace("{work}", str(self._work)) for word in case.command]
        done = subprocess.run(
            [sys.executable, "-m", "kumi", *words],
            env=self._environment,
            capture_output=True,
            text=True,
            cwd=self._work,
        )
        try:
            printed = json.loads(done.stdout)
        except ValueError:
            printed = done.stdout
        facts: dict[str, Any] = {"exit": done.returncode}
        sentences: dict[str, Any] = {}
        if done.returncode:
            sentences["error"] = self._plain(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "")
        leaves = list(_leaves(printed, "output"))
        for folder in case.folders:
            leaves += self._files(self._work / folder, case.digests)
        for path, value in leaves:
            self._record(path, value, facts, sentences)
        print(f"  {case.name}: exit code {done.returncode}", file=sys.stderr, flush=True)
        return {"facts": facts, "sentences": sentences}

    def _files(self, folder: Path, digests: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
        """Yield the names of all files in `folder`, the SHA-256 of those in `digests`, and the metrics."""
        for file in sorted(path for path in folder.rglob("*") if path.is_file()):
            name = str(file.relative_to(folder))
            with_digest = any(not below or name.startswith(f"{below}/") for below in digests)
            content = file.read_bytes()
            yield f"file {name}", self._digest(content) if with_digest else "present"
            if name == "metrics.jsonl":
                for number, line in enumerate(content.decode().splitlines()):
                    yield from _leaves(json.loads(line), f"metrics {number}")

    def _digest(self, content: bytes) -> str:
        """Return the SHA-256 of `content`, with the name of the work folder replaced."""
        return hashlib.sha256(content.replace(str(self._work).encode(), b"{work}")).hexdigest()

    def _plain(self, text: str) -> str:
        for place, name in self._places.items():
            text = text.replace(place, name)
        return text

    def _record(self, path: str, value: Any, facts: dict[str, Any], sentences: dict[str, Any]) -> None:
        if MEASURED.search(path) and not isinstance(value, str):
            facts[path] = f"<{type(value).__name__}>"
        elif isinstance(value, str) and " " in value:
            sentences[path] = self._plain(value)
        else:
            facts[path] = self._plain(value) if isinstance(value, str) else value


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield the path and the value of every number, text and empty container in `value`."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}")
    elif isinstance(value, list) and value:
        for index, inner in enumerate(value):
            yield from _leaves(inner, f"{path}.{index}")
    else:
        yield path, value


def differences(before: Recorded, after: Recorded, kind: str) -> list[str]:
    """Return a line for each difference in `kind`, "facts" or "sentences"."""
    lines = [f"{name}: only {'before' if name in before else 'after'}" for name in sorted(before.keys() ^ after.keys())]
    for name in before.keys() & after.keys():
        old, new = before[name][kind], after[name][kind]
        for path in sorted(old.keys() | new.keys()):
            was, now = old.get(path, "<missing>"), new.get(path, "<missing>")
            if was != now:
                lines.append(f"{name}: {path}: {was!r} -> {now!r}")
    return sorted(lines)


def report(before: Recorded, after: Recorded) -> int:
    """Print the differences; return the exit code, 1 if facts differ."""
    facts, sentences = (differences(before, after, kind) for kind in ("facts", "sentences"))
    for line in facts:
        print(line)
    count = sum(len(case["facts"]) for case in after.values())
    failed = sum(case["facts"]["exit"] != 0 for case in after.values())
    print(
        f"{len(after)} cases ({failed} end with an error), {count} facts: {len(facts)} differ; "
        f"{len(sentences)} sentences are worded differently"
    )
    return 1 if facts else 0


def against(commit: str, parts: list[str]) -> int:
    """Compare `commit` with the present state of this folder."""
    with tempfile.TemporaryDirectory(prefix="golden-tree-") as scratch:
        tree = Path(scratch) / "tree"
        git = ["git", "-C", str(ROOT), "worktree"]
        added = subprocess.run([*git, "add", "--detach", "--quiet", str(tree), commit], capture_output=True, text=True)
        if added.returncode:
            raise SystemExit(f"{commit}: git has no such commit here ({added.stderr.strip()}); name one of git log")
        try:
            before = make(tree / "src", parts)
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)
    return report(before, make(ROOT / "src", parts))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    verbs = parser.add_subparsers(dest="verb", required=True)
    making, comparing, both = (verbs.add_parser(name) for name in ("make", "compare", "against"))
    making.add_argument("file", type=Path)
    making.add_argument("--source", type=Path, default=ROOT / "src")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    both.add_argument("commit")
    for verb in (making, both):
        verb.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    args = parser.parse_args()
    for file in (args.before, args.after) if args.verb == "compare" else ():
        if not file.is_file():
            parser.error(f"{file}: not a file; make one with: golden.py make {file}")
    if args.verb == "make":
        args.file.write_text(json.dumps(make(args.source.resolve(), args.only), indent=1, sort_keys=True) + "\n")
        return 0
    if args.verb == "against":
        return against(args.commit, args.only)
    return report(*(json.loads(file.read_text()) for file in (args.before, args.after)))


if __name__ == "__main__":
    sys.exit(main())
