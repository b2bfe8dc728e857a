"""The planner lists the messages that the trainer sends in a step: kinds, groups, counts and bytes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from grids import sampled
from kumi.parallel import build, clip_gradients, unwrap
from kumi.plan.time.traffic import collectives
from kumi.spec.layout import Layout
from kumi.spec.precision import PRECISIONS
from planned import job_of
from steps import LENGTH, SEQUENCES, SPECS, forward_backward, mesh_of
from watch import Sent

DIVIDED = [
    *(Layout(dp_shard=4, zero=zero) for zero in (1, 2, 3)),
    *(Layout(dp_replicate=2, dp_shard=2, zero=zero) for zero in (1, 2, 3)),
]
MICROBATCHES = (1, 3)


def _sent(layout, family, kind):
    """Return the messages of this rank in a step, for each number of `MICROBATCHES`."""
    mesh = mesh_of(layout)
    model, steps = build(SPECS[family], mesh, PRECISIONS[kind], weights=0), []
    for _ in range(0 if unwrap(model) is model else 2):
        # DistributedDataParallel broadcasts the order of gradients once, in the second step.
        forward_backward(model, mesh, 0, 1)
    for microbatches in MICROBATCHES:
        with Sent() as watch:
            forward_backward(model, mesh, 0, microbatches)
            clip_gradients(model, 1.0, mesh)
        # The caller sums the loss over all ranks, in float64; this message is not part of the step.
        watch.seen["all_reduce", layout.world_size, 8] -= 1
        steps.append(+watch.seen)
    return steps


def _planned(layout, family, kind, microbatches, pp_rank=0):
    """Return the messages that the planner lists, counted as in `_sent`."""
    job = job_of(SPECS[family], seq_len=LENGTH, sequences=SEQUENCES, kind=kind)
    layout = replace(layout, microbatch=SEQUENCES // (layout.dp * microbatches))
    assert job.batch.microbatches(layout) == microbatches
    messages = Counter()
    for entry in collectives(job, layout, pp_rank):
        messages[entry.kind, entry.degree, entry.bytes] += entry.count
    return messages


@pytest.mark.parametrize(
    ("family", "layout", "kind"),
    [
        *(("llama", layout, "bf16") for layout in DIVIDED[:4]),
        *(("qwen", layout, "bf16") for layout in DIVIDED[4:]),
        ("llama", DIVIDED[2], "fp32"),
        *(pytest.param("llama", layout, "bf16", marks=pytest.mark.exhaustive) for layout in DIVIDED[4:]),
        *(pytest.param("qwen", layout, "bf16", marks=pytest.mark.exhaustive) for layout in (DIVIDED[0], DIVIDED[2])),
    ],
)
def test_divided_states(ranks, family, layout, kind):
    planned = [_planned(layout, family, kind, microbatches) for microbatches in MICROBATCHES]
    assert {kind for kind, _, _ in planned[0]} >= {"all_gather", "reduce_scatter", "all_reduce"}
    for sent in ranks(4, _sent, layout, family, kind):
        assert sent == planned


CUT = [
    ("llama", Layout(tp=2, recompute="full")),
    ("qwen", Layout(tp=4, recompute="selective")),
    ("qwen", Layout(tp=2, sequence_parallel=False, recompute="full")),
    ("latent", Layout(tp=2, recompute="selective")),
    ("moe", Layout(tp=2, ep=2, recompute="selective")),
    ("moe", Layout(dp_shard=2, tp=2, zero=1, ep=2, expert_tp=2, recompute="full")),
    ("latent", Layout(dp_shard=2, tp=2, zero=3, ep=4)),
    ("qwen", Layout(cp=2, tp=2, recompute="full")),
    ("moe", Layout(cp=2, dp_shard=2, zero=3, ep=2)),
    ("deep", Layout(pp=2, tp=2, schedule="1f1b")),
    ("deep-tied", Layout(pp=2, schedule="zb-v", stages=2, dp_shard=2, zero=1)),
    ("gpt", Layout(tp=2, sequence_parallel=False, recompute="full")),
    ("gpt", Layout(tp=2, recompute="selective")),
    ("gemma", Layout(tp=2, recompute="full")),
    ("biased-moe", Layout(tp=2, expert_tp=2)),
]
# The layouts above send the messages of these, and others.
LATER = [
    ("llama", Layout(tp=2)),
    ("qwen", Layout(tp=2, dp_shard=2, zero=3)),
    ("latent", Layout(tp=2, recompute="full")),
    ("moe", Layout(dp_shard=2, zero=3, ep=2, recompute="full")),
    ("llama", Layout(cp=2)),
    ("deep-tied", Layout(pp=2, dp_shard=2, zero=3)),
    ("gpt", Layout(tp=2)),
    ("gpt", Layout(dp_shard=2, zero=3)),
]


def _named(case):
    return (
        "-".join(f"{key}{value}" for key, value in vars(case).items() if value != getattr(Layout(), key))
        if isinstance(case, Layout)
        else case
    )


@pytest.mark.parametrize(
    ("family", "layout"),
    sampled([*CUT, *LATER], lambda place: place < len(CUT), lambda *case: "-".join(map(_named, case))),
)
def test_layouts_that_cut_the_model(ranks, family, layout):
    """The tokens sent to experts differ between ranks; their sum over all ranks is the planner's."""
    sent_sums, planned_sums = (Counter(dict.fromkeys(("count", "bytes"), 0)) for _ in range(2))
    for rank, sent in enumerate(ranks(layout.world_size, _sent, layout, family, "bf16")):
        for seen, microbatches in zip(sent, MICROBATCHES, strict=True):
            listed = _planned(layout, family, "bf16", microbatches, layout.coords(rank)["pp"])
            for messages, sums in ((seen, sent_sums), (listed, planned_sums)):
                for key in [key for key in messages if key[0] == "all_to_all"]:
                    count = messages.pop(key)
                    sums.update(count=count, bytes=count * key[2])
            assert seen == listed
    assert sent_sums == planned_sums


# One model for each kind of layer; test_state_bytes counts the bytes of the others.
OFTEN = ("deep-tied", "latent", "gpt", "biased-moe", "hybrid")


@pytest.mark.parametrize(
    "family", [name if name in OFTEN else pytest.param(name, marks=pytest.mark.exhaustive) for name in SPECS]
)
def test_copies_send_as_many_bytes_in_buckets_of_their_own(ranks, family):
    layout = Layout(dp_replicate=2)
    for sent in ranks(2, _sent, layout, family, "bf16"):
        for seen, microbatches in zip(sent, MICROBATCHES, strict=True):
            planned = _planned(layout, family, "bf16", microbatches)
            assert {key[:2] for key in (*planned, *seen)} == {("all_reduce", 2)}
            sent_bytes, planned_bytes = (
                sum(size * count for (_, _, size), count in entry.items()) for entry in (seen, planned)
            )
            assert sent_bytes == planned_bytes
