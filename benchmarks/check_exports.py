"""Reads the exports of many plans with the trainers' own code, each trainer in the Python that it is installed in.

    python benchmarks/check_exports.py                              # the packages of this Python
    python benchmarks/check_exports.py titan/bin/python megatron/bin/python

The trainers' packages do not agree on what they need, so that several virtual environments are the rule. The checks are
those of tests/plan/export/test_parsers.py. One row a check: what was read, or why nothing was.
"""

import argparse
import sys
import tempfile
from pathlib import Path

TESTS = Path(__file__).parents[1] / "tests" / "plan" / "export"


def checks(module):
    """The checks of `module` as (name, arguments), one for each script and trainer that they are for."""
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
    """What became of one check."""
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
            found = outcome(getattr(test_parsers, name), arguments)
            wrong += found.startswith("WRONG")
            print(f"    {' '.join([name.removeprefix('test_').replace('_', ' '), *arguments[1:]]):60s} {found[:400]}")
    return min(wrong, 1)


if __name__ == "__main__":
    raise SystemExit(main())
