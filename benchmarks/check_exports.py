"""Read the exports of many plans with the trainers' own code, each trainer in the Python that it is installed in.

    python benchmarks/check_exports.py                              # the packages of this Python
    python benchmarks/check_exports.py titan/bin/python megatron/bin/python

The trainers' packages have conflicting requirements, so several virtual environments are usual. The checks are those of
tests/plan/export/test_parsers.py. Prints one row per check: read, wrong, or the reason why it was skipped.
"""

import argparse
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).parents[1] / "tests" / "plan" / "export"


def checks(module):
    """Yield the checks of `module` as (name, arguments), one for each script and trainer."""
    pairs = {
        "test_megatron_reads_and_validates_the_run": [
            ("megatron_lm", "megatron-lm"),
            ("megatron_bridge", "megatron-bridge"),
        ]
    }
    for name in vars(module):
        if name.startswith("test_"):
            yield from ((name, arguments) for arguments in pairs.get(name, [()]))


def outcome(check, arguments) -> str:
    """Run one check and return its outcome as text."""
    import pytest

    with tempfile.TemporaryDirectory() as folder:
        try:
            check(Path(folder), *arguments)
        except pytest.skip.Exception as reason:
            return f"not read: {reason}"
        except AssertionError as error:
            return f"WRONG: {error}"
    return "read"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("python", nargs="*", default=[sys.executable], help="interpreters that have trainers installed")
    interpreters = parser.parse_args().python
    sys.path.insert(0, str(TESTS))
    import test_parsers

    wrong = 0
    for test_parsers.PYTHON in interpreters:
        print(test_parsers.PYTHON)
        for name, arguments in checks(test_parsers):
            status = outcome(getattr(test_parsers, name), arguments)
            wrong += status.startswith("WRONG")
            print(f"    {' '.join([name.removeprefix('test_').replace('_', ' '), *arguments[1:]]):60s} {status[:400]}")
    return min(wrong, 1)


if __name__ == "__main__":
    raise SystemExit(main())
