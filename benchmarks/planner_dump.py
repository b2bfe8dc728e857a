"""One line for every row that was scored: what was measured, what is predicted, and what the row states.

Intervals and probabilities are fitted to this table, with whole experiments left out.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from math import log
from pathlib import Path

from planner_defaults import reading_of
from planner_jobs import Case, stated_microbatch, stated_recompute
from planner_scores import Scored, is_hard, noticed

from kumi.plan.memory.device_memory import memory_reading, usable_memory
from kumi.spec.model import MoE

COLUMNS = (
    "id",
    "source",
    "experiment",
    "outcome",
    "engine",
    "experts",
    "gpu",
    "gpus",
    "nodes",
    "seq_len",
    "precision",
    "tp",
    "pp",
    "cp",
    "ep",
    "dp",
    "zero",
    "microbatch",
    "microbatch_stated",
    "recompute",
    "recompute_stated",
    "offload",
    "measured_seconds",
    "predicted_seconds",
    "log_time",
    "time_counts",
    "memory_reading",
    "memory_rank",
    "measured_bytes",
    "predicted_reading_bytes",
    "log_memory",
    "predicted_bytes",
    "predicted_reserved_bytes",
    "predicted_allocated_bytes",
    "usable_bytes",
)


def write_rows(path: Path, ran: Scored, failed: Scored, experiments: Mapping[str, str]) -> None:
    """Write a line of `COLUMNS` for every row of `ran` and `failed` as CSV; `experiments` has each by the row's id.

    `outcome` is "ran", "oom", or "failed" where the table does not say that memory was the reason. `log_time` and
    `log_memory` are log(measured / predicted), blank where nothing was measured. `time_counts` is "n" for the slow rows
    of a noisy grid. `predicted_bytes` is all memory of the fullest rank, which fits if it is at most `usable_bytes`.
    """
    with path.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for scored, is_failure in ((ran, False), (failed, True)):
            writer.writerows(_rows(scored, is_failure, experiments))


def _rows(scored: Scored, is_failure: bool, experiments: Mapping[str, str]) -> Iterator[dict[str, object]]:
    for case, seconds, size in zip(scored.cases, scored.seconds, scored.memory, strict=True):
        run, job, layout = case.run, case.job, case.layout
        reserved, allocated = (memory_reading(job, layout, reading) for reading in ("reserved", "allocated"))
        reading = reading_of(run)
        read_as = memory_reading(job, layout, reading.tool or "reserved", reading.pp_rank)
        yield {
            "id": run.id,
            "source": run.source,
            "experiment": experiments[run.id],
            "outcome": _outcome(case, is_failure),
            "engine": job.engine.name,
            "experts": _yes(any(isinstance(layer.mlp, MoE) for layer in job.model.layers)),
            "gpu": job.cluster.device.name,
            "gpus": layout.world_size,
            "nodes": job.cluster.nodes,
            "seq_len": job.batch.seq_len,
            "precision": job.precision.kind,
            "tp": layout.tp,
            "pp": layout.pp,
            "cp": layout.cp,
            "ep": layout.ep,
            "dp": layout.dp,
            "zero": layout.zero,
            "microbatch": layout.microbatch,
            "microbatch_stated": _yes(stated_microbatch(run) is not None),
            "recompute": layout.recompute,
            "recompute_stated": _yes(stated_recompute(run) is not None),
            "offload": layout.offload,
            "measured_seconds": _number(case.seconds),
            "predicted_seconds": _number(float(seconds)),
            "log_time": _number(case.seconds and log(case.seconds / seconds)),
            "time_counts": _yes(case.seconds is not None and not is_failure and noticed(case)),
            "memory_reading": reading.tool,
            "memory_rank": "fullest" if reading.pp_rank is None else reading.pp_rank,
            "measured_bytes": _number(run.memory),
            "predicted_reading_bytes": _number(read_as),
            "log_memory": _number(run.memory and log(run.memory / read_as)),
            "predicted_bytes": _number(float(size)),
            "predicted_reserved_bytes": _number(reserved),
            "predicted_allocated_bytes": _number(allocated),
            "usable_bytes": usable_memory(job),
        }


def _outcome(case: Case, is_failure: bool) -> str:
    return ("oom" if is_hard(case) else "failed") if is_failure else "ran"


def _yes(value: bool) -> str:
    return "y" if value else "n"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"
