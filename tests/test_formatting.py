"""The formatter decides how code is laid out, everywhere."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_no_line_is_kept_from_the_formatter():
    files = [file for folder in ("src", "tests", "benchmarks", "examples") for file in (ROOT / folder).rglob("*.py")]
    assert len(files) > 500
    assert [str(file) for file in files if re.search(r"# fmt: (skip|off)", file.read_text())] == []
