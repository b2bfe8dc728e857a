"""Every schedule gives the results of one process, and executes its list of actions."""

from itertools import product

import numpy as np
import pytest
import torch

from grids import sampled
from kumi.parallel import build, model_pieces, owned_pieces, pipeline
from kumi.parallel.pipeline_trace import gather_timeline, start_trace, trace_spans
from kumi.spec.layout import Layout
from kumi.spec.ledger import params
from kumi.spec.precision import PRECISIONS
from kumi.spec.schedule import actions, stage_assignment
from kumi.spec.schedules import SCHEDULES
from kumi.spec.sends_and_recvs import dependency
from layouts.test_layouts import alone, equal
from ranks import run_ranks
from steps import SPECS, batch, mesh_of, train


def compare(ranks, layout, family, microbatches):
    expected = alone(family)
    names: set[str] = set()
    for trace in ranks(layout.world_size, train, layout, family, microbatches):
        equal(trace, expected)
        names |= {part.name for part in trace.params}
    assert names == {part.name for part in expected.params}


def piped(pp, schedule, **rest):
    return Layout(pp=pp, schedule=schedule, stages=SCHEDULES[schedule].stages, **rest)


# Beside data axes there are two ranks.
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("pp", [pytest.param(2, marks=pytest.mark.exhaustive), 4])
def test_every_schedule(ranks, pp, schedule):
    compare(ranks, piped(pp, schedule), "deep-tied", 12 if schedule in ("dualpipe", "interleaved") else 6)


# Each way to sum gradients: with full backwards, with deferred weight gradients, and with two stages a rank.
DATA = {
    "copies": ({"dp_replicate": 2}, ("1f1b", "zb-v")),
    "zero1": ({"dp_shard": 2, "zero": 1}, ("interleaved", "zb-h1", "zb-v")),
    "zero3": ({"dp_shard": 2, "zero": 3}, ("1f1b", "zb-h2", "dualpipe")),
}
BESIDE = [(data, schedule) for data, (_, schedules) in DATA.items() for schedule in schedules]


@pytest.mark.parametrize(("data", "schedule"), BESIDE)
def test_data_axes_beside_it(ranks, data, schedule):
    microbatches = 6 if schedule in ("dualpipe", "interleaved") else 3
    layout = piped(2, schedule, **DATA[data][0])
    compare(ranks, layout, "qwen" if layout.stages == 1 else "deep-tied", microbatches)


@pytest.mark.parametrize("zero", [pytest.param(1, marks=pytest.mark.exhaustive), 3])
def test_hybrid_sharding_beside_it(ranks, zero):
    compare(ranks, piped(2, "zb-h1", dp_replicate=2, dp_shard=2, zero=zero), "llama", 3)


@pytest.mark.parametrize(
    ("schedule", "recompute"),
    sampled(list(product(("1f1b", "zb-v"), ("selective", "full"))), lambda place: place in (1, 2)),
)
def test_recomputation_inside_of_stages(ranks, schedule, recompute):
    layout = piped(2, schedule, recompute=recompute)
    compare(ranks, layout, "llama" if layout.stages == 1 else "deep", 6)


@pytest.mark.parametrize(
    ("schedule", "microbatches"),
    # test_faults takes a step of the first four.
    sampled(
        [("1f1b", 1), ("gpipe", 2), ("zb-h1", 2), ("zb-v", 1), ("zb-h2", 3), ("zb-v", 3)], lambda place: place >= 4
    ),
)
def test_fewer_microbatches_than_stages(ranks, schedule, microbatches):
    compare(ranks, piped(4, schedule), "deep-tied", microbatches)


@pytest.mark.parametrize("stage_layers", [(0, 3), (3, 0), (1, 2)])
def test_unequal_stages(ranks, stage_layers):
    compare(ranks, piped(2, "1f1b", stage_layers=stage_layers), "qwen", 3)


def test_a_stage_whose_only_unit_of_fsdp_is_the_root(ranks):
    """It has the tied head, and no layers."""
    compare(ranks, piped(2, "1f1b", stage_layers=(3, 0), dp_shard=2, zero=3), "qwen", 3)


def test_one_rank_runs_a_pipelines_list(ranks):
    compare(ranks, piped(1, "zb-v"), "deep-tied", 3)


HALF = [(zero, kind) for zero in (0, 1, 3) for kind in ("bf16", "fp16")]


@pytest.mark.parametrize(("zero", "kind"), sampled(HALF, lambda place: place in (3, 4)))
def test_half_precision(ranks, zero, kind):
    data = {"dp_shard": 2, "zero": zero} if zero else {}
    expected = run_ranks(1, train, Layout(), "llama", 3, kind)[0]
    for trace in ranks(2 * data.get("dp_shard", 1), train, piped(2, "zb-h1", **data), "llama", 3, kind):
        assert trace.losses == pytest.approx(expected.losses, rel=1e-3)
        assert trace.norms[0] == pytest.approx(expected.norms[0], rel=5e-3)
        assert trace.norms == pytest.approx(expected.norms, rel=5e-2)


def recorded(layout, microbatches):
    """Return the actions of this rank, and on the first rank those of the pipeline."""
    mesh = mesh_of(layout)
    model = build(SPECS["deep"], mesh, PRECISIONS["fp32"], weights=7)
    record = start_trace(mesh)
    ids = torch.ones(microbatches, 1, 7, dtype=torch.int64)
    inputs = {"labels": ids[0], "token_weights": torch.ones(1, 7)}
    loss = pipeline.train_microbatches(model, mesh, [{"input_ids": one, **inputs} for one in ids], record)
    return trace_spans(record), gather_timeline(record, mesh), loss.item()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_what_ran_is_the_schedules_list(ranks, schedule):
    layout = piped(2, schedule)
    recordings = ranks(2, recorded, layout, 4)
    lists = actions(schedule, 2, layout.stages, 4)
    for (mine, _, _), listed in zip(recordings, lists):
        assert tuple(span.action for span in mine) == listed
        times = [moment for span in mine for moment in (span.start, span.end)]
        assert times == sorted(times)
    whole = recordings[0][1]
    assert whole.spans == tuple(mine for mine, _, _ in recordings)
    assert recordings[1][1] is None
    # No action begins before the action that it depends on has ended.
    ends = {span.action: span.end for rank in whole.spans for span in rank}
    for rank in whole.spans:
        for span in rank:
            before = dependency(span.action, 2 * layout.stages)
            if before is not None:
                made = ends.get(before, ends.get(before._replace(kind="I")))
                assert made <= span.start + SKEW


# Seconds between two ranks that leave a barrier together.
SKEW = 0.05


def evaluated(layout, microbatches):
    """Return this rank's log-probs of each microbatch, and the gradients afterwards."""
    mesh = mesh_of(layout)
    model = build(SPECS["deep-tied"], mesh, PRECISIONS["fp64"], weights=7)
    parts = [{"input_ids": one, "labels": one.roll(-1, 1)} for one in batch(0)["input_ids"].split(2)[:microbatches]]
    log_probs = pipeline.forward_microbatches(model, mesh, parts)
    assert all(parameter.grad is None for parameter in model.parameters())
    return [one.numpy() for one in log_probs]


@pytest.mark.parametrize(
    ("pp", "schedule", "microbatches"),
    [(2, "1f1b", 3), (2, "zb-v", 3), (2, "interleaved", 1), (4, "zb-v", 5), (4, "gpipe", 2)],
)
def test_forward_alone_gives_what_one_process_gives(ranks, pp, schedule, microbatches):
    expected = run_ranks(1, evaluated, Layout(), microbatches)[0]
    layout = piped(pp, schedule)
    by_rank = ranks(pp, evaluated, layout, microbatches)
    last = next(
        rank
        for rank, held in enumerate(stage_assignment(schedule, pp, layout.stages))
        if pp * layout.stages - 1 in held
    )
    assert [len(one) for one in by_rank] == [microbatches * (rank == last) for rank in range(pp)]
    for actual, other in zip(by_rank[last], expected):
        np.testing.assert_allclose(actual, other, rtol=1e-12)


def saved(layout):
    """Return the names and positions of the pieces that this rank saves."""
    mesh = mesh_of(layout)
    model = build(SPECS["deep-tied"], mesh, PRECISIONS["fp32"], weights=7)
    return [(piece.name, piece.start) for piece in owned_pieces(model_pieces(model, mesh), model, mesh)]


@pytest.mark.parametrize(
    ("pp", "schedule", "data"),
    [(2, "1f1b", {}), (2, "zb-v", {}), (4, "interleaved", {}), (2, "1f1b", {"dp_shard": 2, "zero": 1})],
)
def test_every_part_is_saved_by_one_rank(ranks, pp, schedule, data):
    layout = piped(pp, schedule, **data)
    every = [piece for mine in ranks(layout.world_size, saved, layout) for piece in mine]
    assert len(every) == len(set(every))
    assert {name for name, _ in every} == {f"model/{param.name}" for param in params(SPECS["deep-tied"])}
