"""Draw docs/images/quickstart.svg from the metrics of a finished quickstart run.

python docs/images/draw.py runs/quickstart docs/images/quickstart.svg
"""

from __future__ import annotations

import sys
from pathlib import Path

from kumi.report import palette, svg
from kumi.train.metrics import read_metrics

LEFT, TOP, BOTTOM = 48.0, 64.0, 300.0


def draw(run: Path) -> str:
    """Return training and validation loss over the tokens, with the unigram entropy, as an SVG document."""
    entries = read_metrics(run / "metrics.jsonl")
    tokens = {entry["step"]: entry["tokens"] / 1e6 for entry in entries if "tokens" in entry}
    trained = [(tokens[entry["step"]], entry["train/loss"]) for entry in entries if "train/loss" in entry]
    evaluated = [(tokens[entry["step"]], entry["eval/loss"]) for entry in entries if "eval/loss" in entry]
    entropy = next(entry["eval/unigram_entropy"] for entry in entries if "eval/unigram_entropy" in entry)
    low, high = min(loss for _, loss in (*trained, *evaluated)) - 0.2, max(loss for _, loss in trained) + 0.1

    def at(million: float, loss: float) -> tuple[float, float]:
        x = LEFT + million / trained[-1][0] * (svg.RIGHT - LEFT)
        return x, BOTTOM + (loss - low) / (high - low) * (TOP - BOTTOM)

    marks, _ = svg.legend([("training loss", palette.SKY, False),
                           (f"validation loss, {evaluated[-1][1]:.2f} at the end", palette.BLUE, False),
                           (f"unigram entropy, {entropy:.2f}", palette.ORANGE, False)])  # fmt: skip
    for value in (value for value in svg.ticks(high) if value >= low):
        y = at(0, value)[1]
        marks += [svg.line(LEFT, y, svg.RIGHT, y, opacity=0.15), svg.text(LEFT - 8, y + 4, f"{value:g}", anchor="end")]
    for value in svg.ticks(trained[-1][0]):
        marks.append(svg.text(at(value, low)[0], BOTTOM + 18, f"{value:g}", anchor="middle"))
    marks += [
        svg.text(12, TOP - 16, "nats a token"),
        svg.text((LEFT + svg.RIGHT) / 2, BOTTOM + 38, "million tokens", anchor="middle"),
        *(svg.shape([(x, at(0, entropy)[1]), (min(x + 8.0, svg.RIGHT), at(0, entropy)[1])], fill=palette.ORANGE,
                    closed=False) for x in range(int(LEFT), int(svg.RIGHT), 14)),
        svg.shape([at(*point) for point in trained], fill=palette.SKY, closed=False),
        svg.shape([at(*point) for point in evaluated], fill=palette.BLUE, closed=False),
        *(svg.rect(x - 4, y - 4, 8, 8, palette.BLUE) for x, y in (at(*point) for point in evaluated)),
    ]  # fmt: skip
    title = "kumi train examples/quickstart.toml"
    about = (f"Training and validation loss fall over {trained[-1][0]:.2f} million tokens, the validation loss to "
             f"{evaluated[-1][1]:.2f}, below the unigram entropy of {entropy:.2f}.")  # fmt: skip
    return svg.picture("quickstart", title, about, BOTTOM + 50, marks)


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(draw(Path(sys.argv[1])))
