"""Draw the packages of kumi as floors: python docs/images/floors.py, in the repository's root."""

from __future__ import annotations

from pathlib import Path

from kumi.report import palette, svg

HERE = Path(__file__).parent
# From the top down: what a floor is about, and its packages. A package imports from its own floor and those below it.
FLOORS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("commands and Python functions", ("cli", "api")),
    ("training, evaluating, launching", ("validation", "bench", "train", "rollout", "evaluation", "doctor", "launch")),
    ("text from models", ("inference",)),
    ("models on many ranks", ("parallel", "dryrun")),
    ("conversion", ("convert",)),
    ("layers and checkpoints", ("nn", "storage", "compat", "accelerator")),
    ("plans and runs, shown", ("report",)),
    ("run files", ("config",)),
    ("machines, training data, rewards", ("clusters", "data", "rewards")),
    ("other trainers' configurations", ("export",)),
    ("the planner: memory, time, search", ("plan",)),
    ("descriptions: frozen data", ("spec", "objectives", "megatron")),
    (
        "files, errors, units",
        (
            "hub",
            "remote",
            "files",
            "safe_output",
            "progress",
            "units",
            "paths",
            "process_limits",
            "json_worker",
            "errors",
            "deprecated",
        ),
    ),
)
TORCH = {
    "validation",
    "accelerator",
    "train",
    "rollout",
    "evaluation",
    "bench",
    "doctor",
    "launch",
    "convert",
    "inference",
    "dryrun",
    "parallel",
    "nn",
    "compat",
}
LEFT, ROW, GAP = 250.0, 34.0, 6.0


def floors() -> str:
    """Return the picture as an SVG document."""
    marks, y = svg.legend((("imports torch", palette.ORANGE, False), ("does not", palette.SKY, False)))
    y += 8
    for label, packages in FLOORS:
        marks.append(svg.text(LEFT - 12, y + 19, label, anchor="end", size=12))
        width = (svg.RIGHT - LEFT + GAP) / len(packages)
        for number, name in enumerate(packages):
            x, fill = LEFT + number * width, palette.ORANGE if name in TORCH else palette.SKY
            marks.append(svg.rect(x, y, width - GAP, ROW - 6, fill))
            middle = x + (width - GAP) / 2
            marks.append(
                svg.text(
                    middle,
                    y + 18,
                    name,
                    anchor="middle",
                    size=12 if len(packages) < 6 else 10.5,
                    fill=svg.contrasting(fill),
                )
            )
        y += ROW
    about = "; ".join(f"{label}: {', '.join(packages)}" for label, packages in FLOORS)
    return svg.picture("floors", "The packages of kumi, from the top floor to the ground", about, y + 6, marks)


if __name__ == "__main__":
    (HERE / "floors.svg").write_text(floors() + "\n")
