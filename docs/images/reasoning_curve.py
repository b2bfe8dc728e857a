"""Draw docs/images/reasoning.svg from runs of examples/format.toml and examples/reasoning.toml with several seeds.

python docs/images/reasoning_curve.py benchmarks/results/reasoning.json docs/images/reasoning.svg

The file has the figures of the runs: `python benchmarks/reasoning.py` writes it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from kumi.report import palette, svg

LEFT, TOP, BOTTOM = 48.0, 64.0, 300.0
COLOURS = (palette.BLUE, palette.ORANGE, palette.GREEN)


def draw(file: Path) -> str:
    """Return scores and held-out accuracy over the updates as an SVG document, a colour for each seed."""
    runs = json.loads(file.read_text())["runs"]
    last = max(step for run in runs for step, _ in run["accuracy"])

    def at(step: float, share: float) -> tuple[float, float]:
        return LEFT + step / last * (svg.RIGHT - LEFT), BOTTOM + share * (TOP - BOTTOM)

    entries = [(f"seed {run['seed']}", colour, False) for run, colour in zip(runs, COLOURS, strict=True)]
    marks, _ = svg.legend(entries)
    for share in (0, 0.25, 0.5, 0.75, 1):
        y = at(0, share)[1]
        marks += [svg.line(LEFT, y, svg.RIGHT, y, opacity=0.15), svg.text(LEFT - 8, y + 4, f"{share:g}", anchor="end")]
    for step in svg.ticks(last):
        marks.append(svg.text(at(step, 0)[0], BOTTOM + 18, f"{step:g}", anchor="middle"))
    marks += [
        svg.text(
            12,
            TOP - 16,
            "lines: mean score of the answers of a batch; squares: accuracy on 200 held-out problems, greedy",
        ),
        svg.text((LEFT + svg.RIGHT) / 2, BOTTOM + 38, "updates", anchor="middle"),
    ]
    for run, colour in zip(runs, COLOURS, strict=True):
        marks.append(svg.shape([at(*point) for point in run["reward"]], fill=colour, closed=False))
        marks += [svg.rect(x - 4, y - 4, 8, 8, colour) for x, y in (at(*point) for point in run["accuracy"])]
    before, after = (min(run["accuracy"][place][1] for run in runs) for place in (0, -1))
    about = (
        f"Held-out accuracy of {len(runs)} seeds rises within {last} updates, from {before:.2f} or more before the "
        f"first one to at least {after:.2f}."
    )
    return svg.picture("reasoning", "kumi train examples/reasoning.toml", about, BOTTOM + 50, marks)


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(draw(Path(sys.argv[1])))
