"""Write what kumi prints into the pages of this folder: python docs/guides/outputs.py, in the repository's root.

A block stands between `<!-- printed: TITLE -->` and `<!-- end -->`: the paragraph of the report of COMMAND that begins
with the line TITLE, or the first one where TITLE is "head".
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from pathlib import Path

from kumi.cli import main as kumi

COMMAND = "kumi plan examples/plan/llama-3-8b.toml"
PAGES = sorted(Path(__file__).parent.glob("*.md"))
BLOCK = re.compile(r"(<!-- printed: ([^>]+) -->)(?:(?!<!--).)*(<!-- end -->)", re.S)


def sections() -> dict[str, str]:
    """Return the paragraphs of the report of COMMAND by their first lines; the first one is "head"."""
    written = io.StringIO()
    with contextlib.redirect_stdout(written):
        if code := kumi(shlex.split(COMMAND)[1:]):
            raise RuntimeError(f"{COMMAND}: exit code {code}")
    paragraphs = [part.strip("\n") for part in written.getvalue().split("\n\n")]
    lines = "\n".join(line.rstrip() for line in paragraphs[0].splitlines())
    return {"head": lines} | {
        part.splitlines()[0].strip(): "\n".join(line.rstrip() for line in part.splitlines()) for part in paragraphs[1:]
    }


def refreshed(page: str, printed: dict[str, str]) -> str:
    """Return the text of a page with what kumi prints today."""
    return BLOCK.sub(lambda block: f"{block[1]}\n\n```text\n{printed[block[2]]}\n```\n\n{block[3]}", page)


if __name__ == "__main__":
    today = sections()
    for path in PAGES:
        path.write_text(refreshed(path.read_text(), today))
