"""Write what kumi prints into the pages of this folder and the README: python docs/guides/outputs.py, in the root.

A block stands between `<!-- printed: TITLE -->` and `<!-- end -->`. Where TITLE is "brief", it has all that COMMAND
prints; else the paragraph of COMMAND --explain that begins with the line TITLE, or the first one where TITLE is "head".
Where TITLE is a command `kumi data` or `kumi plan`, the block has its output; where it is `kumi plan ...: LINE`, the
paragraph of the output that begins with this line.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import tempfile
from collections.abc import Iterable
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


def commands(verb: str) -> list[str]:
    """Return the titles on the pages that are commands `kumi VERB`."""
    titles = [block[2] for page in PAGES for block in BLOCK.finditer(page.read_text())]
    return [title for title in titles if title.startswith(f"kumi {verb} ")]


def data_outputs(titles: Iterable[str]) -> dict[str, str]:
    """Return what `kumi data` commands print with freshly prepared data."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        small = f".toml data.workers=1 train.out={folder}/run"
        return {command: printed_by(command.replace(".toml", small, 1)) for command in titles}


def plan_output(title: str) -> str:
    """Return what the `kumi plan` command of a title prints, or the paragraph of it that the title names."""
    command, _, line = title.partition(": ")
    parts = (part.strip("\n") for part in printed_by(command).split("\n\n"))
    return next(part for part in parts if part.startswith(line)) if line else printed_by(command)


def sections() -> dict[str, str]:
    """Return the brief as "brief", the paragraphs of the full report by their first lines, the first as "head", and the
    outputs of commands by their titles."""
    head, *others = [part.strip("\n") for part in printed_by(f"{COMMAND} --explain").split("\n\n")]
    paragraphs = {part.splitlines()[0].strip(): part for part in others}
    plans = {title: plan_output(title) for title in commands("plan")}
    return {"brief": printed_by(COMMAND), "head": head} | paragraphs | plans | data_outputs(commands("data"))


def refreshed(page: str, printed: dict[str, str]) -> str:
    """Return the text of a page with what kumi prints today."""
    return BLOCK.sub(lambda block: f"{block[1]}\n\n```text\n{printed[block[2]]}\n```\n\n{block[3]}", page)


if __name__ == "__main__":
    today = sections()
    for path in PAGES:
        path.write_text(refreshed(path.read_text(), today))
