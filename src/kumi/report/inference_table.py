"""Estimates of generation as a table for the terminal and as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kumi.plan.inference.inference_estimates import InferenceEstimate
from kumi.plan.inference.inference_job import InferenceJob
from kumi.report.phrases import digits, machines, seconds
from kumi.spec.cache_state import cache_bytes
from kumi.spec.layout import Layout
from kumi.spec.ledger import active_params, num_params
from kumi.units import format_bytes, format_count

if TYPE_CHECKING:
    from rich.console import RenderableType

# Titles of the columns that every row has.
_SIZES = ("layout", "weights", "cache of\na sequence", "most\nsequences", "batch", "cache of\nthe batch")


def inference_data(
    job: InferenceJob, name: str, estimates: Sequence[InferenceEstimate], context: int
) -> dict[str, Any]:
    """Return the estimates as plain data, for --json."""
    model, cluster = job.model, job.cluster
    return {
        "model": {
            "name": name,
            "parameters": num_params(model),
            "active_parameters": active_params(model),
            "cache_bytes_per_token": _token_bytes(job),
        },
        "cluster": {"device": cluster.device.name, "devices": cluster.devices, "memory_bytes": cluster.device.memory},
        "dtype": {"compute": job.compute, "weights": job.weight_dtype, "cache": job.cache_dtype},
        "context": context,
        "best": estimates[0].as_dict(),
        "others": [item.as_dict() for item in estimates[1:]],
    }


def _token_bytes(job: InferenceJob) -> int:
    """Return the bytes of the cache by which a sequence grows with its next token, before any window is full."""
    return cache_bytes(job.model, 1, 2, job.cache_dtype) - cache_bytes(job.model, 1, 1, job.cache_dtype)


def render_inference(
    job: InferenceJob, name: str, estimates: Sequence[InferenceEstimate], context: int
) -> RenderableType:
    """Return a summary and a table with one row per layout."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    model = job.model
    fixed = cache_bytes(model, 1, 0, job.cache_dtype)
    state = f" and {format_bytes(fixed)} of states" if fixed else ""
    head = (
        f"{name or model.family}, {format_count(num_params(model))} parameters in {job.weight_dtype}, on "
        f"{machines(job.cluster)}: sequences of {context:,} tokens, {_token_bytes(job):,} bytes of cache a token{state}"
    )
    rollouts = any(item.rollout is not None for item in estimates)
    table = Table(box=None, pad_edge=False)
    timed = ("step", "bound by", "tokens/s", "of a\nsequence", *(["all\nreplies", "tokens/s"] if rollouts else []))
    for index, title in enumerate((*_SIZES, *timed)):
        table.add_column(title, justify="left" if index == 0 or title == "bound by" else "right")
    for item in estimates:
        table.add_row(*_cells(item, rollouts=rollouts))
    return Group(Text(head, style="bold"), Text(), table)


def _layout_words(layout: Layout) -> str:
    """Return the degrees, as in "DP 4 x TP 2 x EP 8"; ETP shards each expert."""
    degrees = {"DP": layout.dp, "TP": layout.tp, "EP": layout.ep, "ETP": layout.expert_tp}
    return " x ".join(f"{name} {degree}" for name, degree in degrees.items() if degree > 1) or "one device"


def _cells(item: InferenceEstimate, *, rollouts: bool) -> list[str]:
    """Return the row of a layout; it ends early where the layout does not fit or its speed is unknown."""
    sizes = (item.memory.weights, item.sequence_cache)
    cells = [_layout_words(item.layout), *map(format_bytes, sizes), f"{item.most_sequences:,}", f"{item.batch:,}"]
    if not item.fits:
        return [*cells, "does not fit"]
    cells.append(format_bytes(item.memory.cache))
    if item.step_seconds is None or item.tokens_per_second is None:
        return [*cells, "speed unknown"]
    rate = digits(1 / item.step_seconds)
    cells += [seconds(item.step_seconds), item.bound_by, format_count(item.tokens_per_second), rate]
    if rollouts and item.rollout is not None and item.rollout_tokens_per_second is not None:
        cells += [seconds(item.rollout.seconds), format_count(item.rollout_tokens_per_second)]
    return cells
