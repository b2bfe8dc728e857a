"""How accurate the planner is on published runs.

python benchmarks/planner_accuracy.py RUNS.csv [--failures FAILURES.csv] [--json OUT] [--rows OUT.csv]

RUNS.csv has the columns of tests/published/runs.csv (torchtitan.csv and megatron.csv there are read, too),
FAILURES.csv layouts that did not run. What a row leaves out is completed by benchmarks/planner_defaults.py. Printed for
every source, every experiment (a campaign; small ones are pooled) and over all: the mean absolute and the signed error
of a step's time, the error of the simplest model (one median FLOP/s for each GPU and precision, fitted on the same
source) and of the same with a constant from the other experiments, Spearman's correlation among layouts for one job,
the regret of taking the layout predicted to be fastest, the error of peak memory, and how many layouts are rightly said
to fit or not.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from planner_dump import write_rows
from planner_experiments import experiments_of
from planner_jobs import Case, case_of
from planner_rows import read
from planner_scores import (
    Estimator,
    Scored,
    complete,
    fit_scores,
    memory_scores,
    planner,
    predict,
    reasons,
    sources_of,
    time_scores,
)

# Sources whose runs were looked at when constants of devices and links were set; all others only check them.
FIT = ("sc21t1", "hag", "vtrain-m", "vtrain-s", "dgxc", "mbridge", "nano")

# Scores whose mean over experiments is in the summary.
EXPERIMENT_MEANS = (
    "time_mean_abs_error",
    "one_constant_mean_abs_error",
    "others_constant_mean_abs_error",
    "memory_mean_abs_error",
)


def accuracy(
    runs: Path, failures: Path | None = None, estimator: Estimator = planner, rows: Path | None = None
) -> dict:
    """The scores as plain data: `sources` (one object each), `parts` (fit and check) and `summary`. With `rows`, a line
    for every scored row is written there."""
    ran, refused = cases(runs, measured=True)
    ran, impossible = complete(ran, estimator)
    refused += impossible
    failed, refused_failures = cases(failures, measured=False) if failures is not None else ([], [])
    scored, missed = predict(ran, estimator), predict(failed, estimator)
    experiments = experiments_of([case.run for case in (*scored.cases, *missed.cases)])
    scored = scored.with_others(experiments)
    if rows is not None:
        write_rows(rows, scored, missed, experiments)
    by_source = sources_of(scored) | {name: scored.where([]) for name, _ in refused if name not in sources_of(scored)}
    unused = reasons(refused)
    sources = [
        {
            "source": name,
            "part": part(name),
            **scores(some, failed_of(missed, name)),
            "unused_rows": sum(unused.get(name, {}).values()),
            "unused": unused.get(name, {}),
        }
        for name, some in by_source.items()
    ]
    by_experiment = [
        {
            "experiment": name,
            **scores(of_experiment(scored, experiments, name), of_experiment(missed, experiments, name)),
        }
        for name in dict.fromkeys(experiments.values())
    ]
    parts = {
        name: scores(
            scored.where([part(c.run.source) == name for c in scored.cases]),
            missed.where([part(c.run.source) == name for c in missed.cases]),
        )
        for name in ("fit", "check")
    }
    better = [one for one in by_experiment if one.get("others_constant_mean_abs_error") is not None]
    summary = (
        scores(scored, missed)
        | {
            "rows": len(ran) + len(refused),
            "used_rows": len(ran),
            "unused_rows": len(refused),
            "unused": reasons(refused),
            "failure_rows": len(failed) + len(refused_failures),
            "unused_failures": reasons(refused_failures),
            "source_mean_abs_error": mean_of(sources, "time_mean_abs_error"),
            "source_one_constant_mean_abs_error": mean_of(sources, "one_constant_mean_abs_error"),
            "experiments": len(better),
            "experiments_better_than_others_constant": sum(
                one["time_mean_abs_error"] < one["others_constant_mean_abs_error"] for one in better
            ),
        }
        | {f"experiment_{name}": mean_of(by_experiment, name) for name in EXPERIMENT_MEANS}
    )
    return {"sources": sources, "experiments": by_experiment, "parts": parts, "summary": summary}


def of_experiment(scored: Scored, experiments: Mapping[str, str], name: str) -> Scored:
    return scored.where([experiments[case.run.id] == name for case in scored.cases])


def cases(path: Path, *, measured: bool) -> tuple[list[Case], list[tuple[str, str]]]:
    """The runs of a file that can be scored; and (source, reason) of those that cannot."""
    scored: list[Case] = []
    refused: list[tuple[str, str]] = []
    for run in read(path):
        case = case_of(run, measured=measured)
        if isinstance(case, str):
            refused.append((run.source, case))
        else:
            scored.append(case)
    return scored, refused


def part(source: str) -> str:
    return "fit" if source in FIT else "check"


def failed_of(missed: Scored, source: str) -> Scored:
    """Failures of the same set: their ids begin with the source's name."""
    return missed.where(
        [
            case.run.source.split("-")[0] == source.split("-")[0]
            and source in (case.run.source, case.run.source.removesuffix("-oom").removesuffix("-fail"))
            for case in missed.cases
        ]
    )


def scores(ran: Scored, failed: Scored) -> dict:
    return time_scores(ran) | memory_scores(ran) | fit_scores(ran, failed)


def mean_of(sources: Sequence[dict], name: str) -> float | None:
    """The mean over sources that have a score, each counting once however many rows it has."""
    values = [source[name] for source in sources if source.get(name) is not None]
    return float(np.mean(values)) if values else None


def report(result: dict) -> str:
    """The scores as a table: percentages, and rows behind them."""
    rows = [
        (
            "source",
            "part",
            "rows",
            "error",
            "signed",
            "1 const",
            "others'",
            "rank",
            "(rows)",
            "regret",
            "(sets)",
            "memory",
            "(rows)",
            "fits",
            "oom",
            "unused",
        )
    ]
    rows += [_line(source["source"], source["part"], source) for source in result["sources"]]
    rows += [_line(f"all {name}", "", some) for name, some in result["parts"].items()]
    rows += [_line("all", "", result["summary"])]
    rows += [("experiment", *rows[0][1:])]
    rows += [_line(one["experiment"], "", one) for one in result["experiments"]]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.ljust(width) if column < 2 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths))
        )
        for row in rows
    ]
    summary = result["summary"]
    lines.insert(len(rows) - len(result["experiments"]) - 1, "")
    lines.append("")
    lines.append(
        f"{summary['experiments']} experiments, each counted once: error "
        f"{_percent(summary['experiment_time_mean_abs_error'])}, one constant of their own "
        f"{_percent(summary['experiment_one_constant_mean_abs_error'])}, one constant of the others "
        f"{_percent(summary['experiment_others_constant_mean_abs_error'])}; the planner is better than the latter in "
        f"{summary['experiments_better_than_others_constant']} of {summary['experiments']}"
    )
    lines.append(
        f"{summary['used_rows']} of {summary['rows']} runs used; every source counted once: error "
        f"{_percent(summary['source_mean_abs_error'])}, one constant "
        f"{_percent(summary['source_one_constant_mean_abs_error'])}"
    )
    for kind, unused in (("runs", summary["unused"]), ("failures", summary["unused_failures"])):
        lines += [
            f"not used, {kind}: {source}: {count} ({reason})"
            for source, counts in unused.items()
            for reason, count in counts.items()
        ]
    return "\n".join(lines)


def _line(name: str, which: str, some: dict) -> tuple[str, ...]:
    rank = some.get("spearman")
    return (
        name,
        which,
        str(some.get("time_rows", 0)),
        _percent(some.get("time_mean_abs_error")),
        _percent(some.get("time_signed_error")),
        _percent(some.get("one_constant_mean_abs_error")),
        _percent(some.get("others_constant_mean_abs_error")),
        "-" if rank is None else f"{rank:.3f}",
        str(some.get("spearman_rows", 0)),
        _percent(some.get("top1_regret")),
        str(some.get("top1_regret_groups", 0)),
        _percent(some.get("memory_mean_abs_error")),
        str(some.get("memory_rows", 0)),
        _percent(some.get("fits_recall")),
        _percent(some.get("oom_recall")),
        str(some.get("unused_rows", 0)),
    )


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f}%"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="How accurate the planner is on published runs.")
    parser.add_argument("runs", type=Path, help="measured runs, in the columns of tests/published/runs.csv")
    parser.add_argument("--failures", type=Path, help="layouts that did not run, in the same columns")
    parser.add_argument("--json", type=Path, help="write the scores there, too")
    parser.add_argument("--rows", type=Path, help="write a line of CSV for every row there: measured and predicted")
    options = parser.parse_args(arguments)
    try:
        result = accuracy(options.runs, options.failures, rows=options.rows)
    except (OSError, ValueError) as error:
        print(f"planner_accuracy: {error}", file=sys.stderr)
        return 2
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(report(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
