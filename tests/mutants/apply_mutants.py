"""Makes the mistakes of `mutants.toml`, each in a copy of the source, and says which of them the tests catch.

    .venv/bin/python tests/mutants/apply_mutants.py                # all of them: `make mutants`
    .venv/bin/python tests/mutants/apply_mutants.py loss rotation  # those with one of these words in their name

The tests must pass without any mistake, which is tried first. The exit code is 0 if all mistakes are caught.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "kumi"
# A mistake that makes ranks wait for each other is caught, too.
SECONDS = 900


@dataclass(frozen=True)
class Mutant:
    """A mistake, and the tests that must fail because of it; `select` is pytest's -k."""

    name: str
    file: str
    old: str
    new: str
    tests: list[str]
    select: str = ""

    def mutated(self) -> str:
        """The text of the file with the mistake. ValueError unless `old` occurs in it once."""
        text = (SOURCE / self.file).read_text()
        if text.count(self.old) != 1:
            raise ValueError(
                f"{self.name!r}: {self.old!r} occurs {text.count(self.old)} times in {self.file}, not once"
            )
        return text.replace(self.old, self.new)


def mutants() -> list[Mutant]:
    """All of `mutants.toml`."""
    listed = tomllib.loads(Path(__file__).with_name("mutants.toml").read_text())
    return [Mutant(**entry) for entry in listed["mutant"]]


def outcome(mutant: Mutant, *, mistaken: bool) -> str:
    """What the mutant's tests do: "pass", "fail", "hang", or what pytest ended with instead."""
    with tempfile.TemporaryDirectory(prefix="kumi-mutant-") as name:
        copy = Path(name) / "kumi"
        shutil.copytree(SOURCE, copy, ignore=shutil.ignore_patterns("__pycache__"))
        if mistaken:
            (copy / mutant.file).write_text(mutant.mutated())
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *mutant.tests]
        command += ["-k", mutant.select] if mutant.select else []
        environment = {**os.environ, "PYTHONPATH": name, "PYTHONDONTWRITEBYTECODE": "1"}
        try:
            ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=SECONDS)
        except subprocess.TimeoutExpired:
            return "hang"
    if ended.returncode > 1:
        return f"pytest ended with {ended.returncode}: {ended.stdout[-2000:]}{ended.stderr[-2000:]}"
    return "fail" if ended.returncode else "pass"


def main(words: list[str]) -> int:
    """Prints a line for each mistake; 1 if one of those with any of `words` in their names is not caught."""
    chosen = [mutant for mutant in mutants() if not words or any(word in mutant.name for word in words)]
    for mutant in chosen:
        mutant.mutated()
    caught, sound = 0, {}
    for mutant in chosen:
        tests, started = (*mutant.tests, mutant.select), time.monotonic()
        if tests not in sound:
            sound[tests] = outcome(mutant, mistaken=False)
        found = outcome(mutant, mistaken=True) if sound[tests] == "pass" else f"without it the tests: {sound[tests]}"
        caught += found in ("fail", "hang")
        verdict = "caught" if found in ("fail", "hang") else "NOT CAUGHT" if found == "pass" else found
        print(f"{verdict:10} {time.monotonic() - started:5.0f} s  {mutant.name} ({mutant.file})", flush=True)
    print(f"{caught} of {len(chosen)} mistakes are caught")
    return int(caught < len(chosen))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
