"""Write what kumi prints into the pages of this folder and the README: python docs/guides/outputs.py, in the root.

A block stands between `<!-- printed: TITLE -->` and `<!-- end -->`. Where TITLE is "brief", it has all that COMMAND
prints; else the paragraph of COMMAND --explain that begins with the line TITLE, or the first one where TITLE is "head".
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from pathlib import Path

from kumi.cli import main as kumi

COMMAND = "kumi plan examples/plan/llama-3-8b.toml"
PAGES = [Path(__file__).parents[2] / "README.md", *sorted(Path(__file__).parent.glob("*.md"))]
BLOCK = re.compile(r"(<!-- printed: ([^>]+) -->)(?:(?!<!--).)*(<!-- end -->)", re.S)


def printed_by(command: str) -> str:
    """Return what a command prints, without blanks at the ends of lines."""
    written = io.StringIO()
    with contextlib.redirect_stdout(written):
        if code := kumi(shlex.split(command)[1:]):
            raise RuntimeError(f"{command}: exit code {code}")
    return "\n".join(line.rstrip() for line in written.getvalue().splitlines())


def sections() -> dict[str, str]:
    """Return the brief as "brief", and the paragraphs of the full report by their first lines; the first is "head"."""
    head, *others = [part.strip("\n") for part in printed_by(f"{COMMAND} --explain").split("\n\n")]
    return {"brief": printed_by(COMMAND), "head": head} | {part.splitlines()[0].strip(): part for part in others}


def refreshed(page: str, printed: dict[str, str]) -> str:
    """Return the text of a page with what kumi prints today."""
    return BLOCK.sub(lambda block: f"{block[1]}\n\n```text\n{printed[block[2]]}\n```\n\n{block[3]}", page)


if __name__ == "__main__":
    today = sections()
    for path in PAGES:
        path.write_text(refreshed(path.read_text(), today))
