"""Apply each mutant of `mutants.toml` to a copy of the source, and report which mutants the tests catch.

    .venv/bin/python tests/mutants/apply_mutants.py                # all mutants: `make mutants`
    .venv/bin/python tests/mutants/apply_mutants.py loss rotation  # mutants with one of these words in their name

The tests are first run without the mutant, where they must pass. The exit code is 0 if all mutants are caught.
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
# A mutant that makes ranks wait for each other counts as caught after this time.
SECONDS = 900


@dataclass(frozen=True)
class Mutant:
    """A mistake in the source, and the tests that must fail because of it."""

    name: str
    file: str  # below src/kumi
    old: str
    new: str
    tests: list[str]
    select: str = ""  # pytest's -k

    def mutated(self) -> str:
        """Return the file's text with the mistake. Raise ValueError unless `old` occurs in it exactly once."""
        text = (SOURCE / self.file).read_text()
        if text.count(self.old) != 1:
            raise ValueError(
                f"{self.name!r}: {self.old!r} occurs {text.count(self.old)} times in {self.file}, not once"
            )
        return text.replace(self.old, self.new)


def mutants() -> list[Mutant]:
    """Return the mutants of `mutants.toml`."""
    table = tomllib.loads(Path(__file__).with_name("mutants.toml").read_text())
    return [Mutant(**entry) for entry in table["mutant"]]


def outcome(mutant: Mutant, *, mistaken: bool) -> str:
    """Run the mutant's tests, on the `mistaken` source or on the original. Return "pass", "fail", "hang", or pytest's
    error."""
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
    """Print a line for each mutant with any of `words` in its name; return 1 if a mutant is not caught."""
    chosen = [mutant for mutant in mutants() if not words or any(word in mutant.name for word in words)]
    for mutant in chosen:
        mutant.mutated()
    caught, sound = 0, {}
    for mutant in chosen:
        tests, started = (*mutant.tests, mutant.select), time.monotonic()
        if tests not in sound:
            sound[tests] = outcome(mutant, mistaken=False)
        result = outcome(mutant, mistaken=True) if sound[tests] == "pass" else f"without the mutant: {sound[tests]}"
        caught += result in ("fail", "hang")
        verdict = "caught" if result in ("fail", "hang") else "NOT CAUGHT" if result == "pass" else result
        print(f"{verdict:10} {time.monotonic() - started:5.0f} s  {mutant.name} ({mutant.file})", flush=True)
    print(f"{caught} of {len(chosen)} mutants are caught")
    return int(caught < len(chosen))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
