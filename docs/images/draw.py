"""Draws docs/images/quickstart.svg from the metrics of a finished quickstart run. Needs matplotlib.

python docs/images/draw.py runs/quickstart docs/images/quickstart.svg
"""

import json
import sys
from pathlib import Path

import matplotlib.pyplot as plt


def draw(run: Path, target: Path) -> None:
    """Training and validation loss over the tokens, beside the unigram entropy."""
    entries = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [entry for entry in entries if "train/loss" in entry]
    tokens = {entry["step"]: entry["tokens"] / 1e6 for entry in steps}
    evaluations = [entry for entry in entries if "eval/loss" in entry]
    entropy = evaluations[-1]["eval/unigram_entropy"]
    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "kumi", "font.family": "sans-serif"})
    figure, axes = plt.subplots(figsize=(7.2, 3.2), layout="constrained")
    axes.plot([tokens[entry["step"]] for entry in steps], [entry["train/loss"] for entry in steps], color="#9aa5b1",
              linewidth=1, label="training loss")  # fmt: skip
    axes.plot([tokens[entry["step"]] for entry in evaluations], [entry["eval/loss"] for entry in evaluations], "o-",
              color="#0b6e99", linewidth=2, label="validation loss, held-out files")  # fmt: skip
    axes.axhline(entropy, color="#c05621", linestyle="--", linewidth=1.5, label=f"unigram entropy {entropy:.2f}")
    last = evaluations[-1]
    axes.annotate(f"{last['eval/loss']:.2f}", (tokens[last["step"]], last["eval/loss"]), textcoords="offset points",
                  xytext=(0, -14), ha="center", color="#0b6e99")  # fmt: skip
    axes.set(xlabel="million tokens", ylabel="nats a token", title="kumi train examples/quickstart.toml")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(target, metadata={"Date": None})


if __name__ == "__main__":
    draw(Path(sys.argv[1]), Path(sys.argv[2]))
