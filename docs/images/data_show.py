"""Draw docs/images/data-show.svg, the output of `kumi data show` on the bundled conversations: run it in the root.

python docs/images/data_show.py
"""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI

from kumi.cli import main as kumi
from kumi.report.token_view import render_units

ROOT = Path(__file__).parents[2]
PICTURE = ROOT / "docs" / "images" / "data-show.svg"
RUN_FILE, UNITS, COLUMNS = "examples/chat.toml", 3, 100
# As rich's own, without its fonts and its remark, which name hosts.
FORMAT = """\
<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: monospace; font-size: {char_height}px; line-height: {line_height}px; }}
.{unique_id}-title {{ font-family: sans-serif; font-size: 18px; font-weight: bold; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" />
</clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


def units() -> list[dict[str, object]]:
    """Return the units that the command shows, with freshly prepared data; paths are relative to the root."""
    written = io.StringIO()
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.chdir(ROOT),
        contextlib.redirect_stdout(written),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        if code := kumi(["data", "show", RUN_FILE, str(UNITS), "--json", f"train.out={folder}/run", "data.workers=1"]):
            raise RuntimeError(f"exit code {code}")
    return list(json.loads(written.getvalue())["units"])


def draw(shown: list[dict[str, object]]) -> str:
    """Return the terminal that shows the units, as an SVG document."""
    console = Console(
        record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor", highlight=False
    )
    console.print(render_units(shown, colour=True))
    picture = console.export_svg(
        title=f"kumi data show {RUN_FILE}", theme=MONOKAI, code_format=FORMAT, unique_id="data-show"
    )
    return "\n".join(line.rstrip() for line in picture.splitlines() if line.strip()) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(draw(units()))
