"""The tables of benchmarks/train_cpu.py, from its measurements.

python benchmarks/report_cpu.py FILE.json      prints the report of a stored measurement
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median

import shapes
from measure import Mark, Measured

GIB = 2**30
# The kinds of measured matmul peak for each number format; a row is compared with the best of them.
PEAK_OF = {"fp32": ("fp32", "fp32 medium"), "bf16": ("bf16",), "amp": ("bf16",)}


def report(result: dict) -> str:
    """Return the report of a measurement as text."""
    parts = [_machine(result), _peaks(result)]
    parts += [_setup(result, setup) for setup in result["setups"]]
    parts += [f"skipped {row}: {reason}" for row, reason in result["skipped"].items()]
    if result["left_out"]:
        parts.append("left out for time: " + "; ".join(result["left_out"]))
    return "\n\n".join(part for part in parts if part)


def _machine(result: dict) -> str:
    description = result["machine"]
    packages = ", ".join(f"{name} {version}" for name, version in description["packages"].items())
    return (
        f"{description['cpu']}, {description['cores']} cores ({' '.join(description['cpu_flags'])}), "
        f"{description['memory_bytes'] / GIB:.0f} GiB; Python {description['python']}, {packages}; "
        f"commit {description['commit']}"
    )


def peak(result: dict, kind: str, key: str = "peak") -> float:
    """Return the best `key` of `kind` over all measurements: "peak" by the wall clock, or "peak_per_cpu_second"."""
    return max(found["kinds"][kind][key] for found in result["peaks"])


def _peaks(result: dict) -> str:
    threads = result["peaks"][0]["threads"]
    kinds = result["peaks"][0]["kinds"]
    listed = ", ".join(f"{kind} {peak(result, kind):.0f}" for kind in kinds)
    errors = ", ".join(f"{kind} {found['error']:.1e}" for kind, found in kinds.items())
    return f"matmul peak, GFLOP/s with {threads} threads: {listed} (relative error against float64: {errors})"


def runs_of(result: dict, setup: dict) -> dict[str, list[Measured]]:
    """Return the runs of every row in `setup`."""
    runs: dict[str, list[Measured]] = {}
    for entry in result["runs"]:
        if entry["setup"] == setup["name"]:
            fields = {key: value for key, value in entry.items() if key not in ("row", "setup", "marks", "output")}
            marks = tuple(Mark(**mark) for mark in entry["marks"])
            runs.setdefault(entry["row"], []).append(Measured(marks=marks, output="", **fields))
    return runs


def spread(values: list[float], form: str) -> str:
    """Return the median, and the range if values differ."""
    low, high, middle = (format(value, form) for value in (min(values), max(values), median(values)))
    return middle if low == high else f"{middle} ({low}-{high})"


def _setup(result: dict, setup: dict) -> str:
    runs, drop = runs_of(result, setup), result["drop"]
    if not runs:
        return ""
    flops = train_flops(result.get("shape", shapes.W1), setup["tokens"])
    head = (
        f"{setup['name']}: {setup['tokens']} tokens a step, {flops / 1e9:.0f} GFLOP; median (and range) of "
        f"{max(map(len, runs.values()))} runs, first {drop} of {setup['steps']} steps dropped"
    )
    columns: list[tuple[str, Callable[[str, list[Measured]], str]]] = [
        (
            "tokens/s",
            lambda row, measured: spread([setup["tokens"] / run.steady(drop).wall for run in measured], ".0f"),
        ),
        ("CPU s/step", lambda row, measured: spread([run.steady(drop).cpu for run in measured], ".2f")),
        ("share of peak", lambda row, measured: _share(result, row, measured, flops)),
        ("first step: s", lambda row, measured: spread([run.first_step().wall for run in measured], ".1f")),
        ("CPU s", lambda row, measured: spread([run.first_step().cpu for run in measured], ".1f")),
        ("peak RSS GiB", lambda row, measured: spread([run.peak_rss / GIB for run in measured], ".2f")),
        ("PSS", lambda row, measured: spread([run.peak_pss / GIB for run in measured], ".2f")),
        ("largest process", lambda row, measured: spread([run.largest_rss / GIB for run in measured], ".2f")),
    ]
    table = [["", *(name for name, _ in columns)]]
    table += [[row, *(cell(row, measured) for _, cell in columns)] for row, measured in runs.items()]
    ratios = [*_default(runs, drop, setup), *_ratios(runs, drop), *_least(runs), *_losses(runs)]
    return "\n".join([head, aligned(table), "", *ratios])


def train_flops(shape: dict, tokens: int) -> int:
    """Return model FLOPs of a step of a model of `shape`, from kumi's ledger."""
    from kumi.spec import families, ledger

    return ledger.train_flops(families.from_hf(shape), tokens, shapes.W1["max_position_embeddings"])


def _share(result: dict, row: str, measured: list[Measured], flops: int) -> str:
    """Return model FLOPs per CPU second, relative to those of a large matmul in the same format."""
    kinds = PEAK_OF[next(word for word in row.split() if word in PEAK_OF)]
    kind = max(kinds, key=lambda kind: peak(result, kind, "peak_per_cpu_second"))
    best = peak(result, kind, "peak_per_cpu_second") * 1e9
    return spread([100 * flops / run.steady(result["drop"]).cpu / best for run in measured], ".0f") + f" % {kind}"


def aligned(table: list[list[str]]) -> str:
    """Return the rows of `table` in columns, the first left-aligned and the others right-aligned."""
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    first, *rest = widths
    return "\n".join(
        "  ".join([row[0].ljust(first), *(cell.rjust(width) for cell, width in zip(row[1:], rest, strict=True))])
        for row in table
    )


PAIRS = (
    ("kumi fp32", "bare fp32"),
    ("kumi bf16", "bare fp32"),
    ("kumi bf16", "bare amp"),
    ("kumi fp32 packed", "bare fp32 packed"),
    ("kumi bf16 packed", "bare amp packed"),
    ("kumi fp32", "trainer fp32"),
    ("kumi bf16", "trainer fp32"),
    ("bare amp", "bare fp32"),
)


def _default(runs: dict[str, list[Measured]], drop: int, setup: dict) -> list[str]:
    """Return kumi's chosen numerics, and its default format compared with the faster of the two bare loops."""
    if "chosen" not in setup:
        return []
    how, lines = setup["chosen"], []
    lines.append(f"kumi chose {how['numerics']}, in {how['seconds']:.2f} s, once on a machine")
    for end in ("", " packed"):
        kumi, bare = f"kumi {how['kind']}{end}", [f"bare {kind}{end}" for kind in ("fp32", "amp")]
        if kumi in runs and all(row in runs for row in bare):
            figures = []
            for figure in (lambda run: run.steady(drop).cpu, lambda run: run.steady(drop).wall):
                least = min(bare, key=lambda row: median(map(figure, runs[row])))
                figures.append(f"{spread(speedups(runs[kumi], runs[least], figure), '.2f')} ({least})")
            lines.append(
                f"{kumi}, the default / the faster bare loop: {figures[0]} by CPU seconds, {figures[1]} by wall clock"
            )
    if {f"kumi {how['kind']}", f"kumi {how['kind']} packed"} <= runs.keys():
        whole, packed = runs[f"kumi {how['kind']}"], runs[f"kumi {how['kind']} packed"]
        cpu = speedups(whole, packed, lambda run: run.steady(drop).cpu)
        wall = speedups(whole, packed, lambda run: run.steady(drop).wall)
        lines.append(
            f"packed documents / whole rows: {spread(cpu, '.2f')} of the CPU seconds, {spread(wall, '.2f')} of the time"
        )
    return lines


def _ratios(runs: dict[str, list[Measured]], drop: int) -> list[str]:
    """Return the speed ratios of the pairs."""
    lines = []
    for fast, slow in PAIRS:
        if fast in runs and slow in runs:
            cpu = speedups(runs[fast], runs[slow], lambda run: run.steady(drop).cpu)
            wall = speedups(runs[fast], runs[slow], lambda run: run.steady(drop).wall)
            lines.append(f"{fast} / {slow}: {spread(cpu, '.2f')} by CPU seconds, {spread(wall, '.2f')} by wall clock")
    return lines


def speedups(fast: list[Measured], slow: list[Measured], seconds: Callable[[Measured], float]) -> list[float]:
    """Return the speed of `fast` relative to the other, run by run if both have equally many, else of the medians."""
    if len(fast) == len(slow):
        return [seconds(b) / seconds(a) for a, b in zip(fast, slow, strict=True)]
    return [median(map(seconds, slow)) / median(map(seconds, fast))]


def _least(runs: dict[str, list[Measured]]) -> list[str]:
    """Return kumi's start-up time and memory next to the least of the other rows."""
    figures: tuple[tuple[str, Callable[[Measured], float]], ...] = (
        ("CPU seconds to the first step", lambda run: run.first_step().cpu),
        ("peak RSS in GiB", lambda run: run.peak_rss / GIB),
    )
    others = [row for row in runs if not row.startswith("kumi")]
    lines = []
    for row in (row for row in runs if row.startswith("kumi") and others):
        for name, figure in figures:
            medians = {other: median(map(figure, runs[other])) for other in others}
            least = min(medians, key=medians.__getitem__)
            mine = median(map(figure, runs[row]))
            lines.append(f"{row}: {mine:.2f} {name}; the least of the others is {medians[least]:.2f} ({least})")
    return lines


def loss_difference(run: list[float], reference: list[float]) -> float:
    """Return the largest relative difference between two loss curves."""
    return max(abs(a - b) / b for a, b in zip(run, reference))


def _losses(runs: dict[str, list[Measured]]) -> list[str]:
    lines = []
    for row, reference in (("kumi bf16", "kumi fp32"), ("kumi fp32", "bare fp32"), ("bare amp", "bare fp32")):
        if row in runs and reference in runs:
            difference = loss_difference(runs[row][0].losses(), runs[reference][0].losses())
            steps = len(runs[row][0].marks)
            lines.append(
                f"loss of {row} against {reference} over {steps} steps: at most {100 * difference:.3f} % apart"
            )
    return lines


if __name__ == "__main__":
    print(report(json.loads(Path(sys.argv[1]).read_text())))
