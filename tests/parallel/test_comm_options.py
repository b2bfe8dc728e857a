"""Gradient communication between data-parallel ranks: dtype, bucket size, compression."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from grids import sampled
from kumi.errors import LayoutError
from kumi.parallel import Mesh, RankInfo, async_tp, build, unwrap
from kumi.parallel.stage_modules import local_shard
from kumi.spec.cluster import ClusterSpec, Device
from kumi.spec.comm import DEFAULT_COMM, Comm, illegal_comm, reduce_precision
from kumi.spec.layout import Layout
from kumi.spec.precision import PRECISIONS
from steps import SPECS, forward_backward, mesh_of

DDP = Layout(dp_replicate=2)


def _gradients(layout, comm, kind="fp64", steps=1, microbatches=1):
    """Return this rank's gradients after the last of `steps` steps; unsharded if no axis shards them."""
    mesh = mesh_of(layout)
    precision = reduce_precision(PRECISIONS[kind], comm)
    model = build(SPECS["llama"], mesh, precision, weights=0, comm=comm)
    for step in range(steps):
        for parameter in model.parameters():
            parameter.grad = None
        forward_backward(model, mesh, step, microbatches, dtype=getattr(torch, precision.param))
    return {name: local_shard(value.grad).clone() for name, value in unwrap(model).named_parameters()}


def _error(actual, expected):
    return max(float((actual[name] - value).norm() / value.norm()) for name, value in expected.items())


@pytest.mark.parametrize(
    ("layout", "kind"),
    sampled(
        list(
            product(
                (DDP, Layout(dp_shard=2, zero=2), Layout(dp_shard=2, zero=3), Layout(dp_replicate=2, pp=2)),
                ("bf16", "fp16"),
            )
        ),
        lambda place: place % 4 in (0, 3),
    ),
)
def test_gradients_of_two_bytes_are_nearly_the_same_and_alike_on_all_ranks(ranks, layout, kind):
    plain = ranks(layout.world_size, _gradients, layout, DEFAULT_COMM, "fp32")
    compressed = ranks(layout.world_size, _gradients, layout, Comm(compress=kind), "fp32")
    for ours, theirs in zip(compressed, plain):
        assert 1e-6 < _error(ours, theirs) < 1e-2
        assert {value.dtype for value in ours.values()} == {torch.float32}
    if layout == DDP:
        assert all(torch.equal(compressed[0][name], value) for name, value in compressed[1].items())


def test_low_rank_gradients_are_sums_and_alike_on_all_ranks(ranks):
    """Two uncompressed steps, then matrices of rank 4 approximate gradients of 18 x 36 and 250 x 18."""
    plain = ranks(2, _gradients, DDP, DEFAULT_COMM, "fp64", 4)
    compressed = ranks(2, _gradients, DDP, Comm(compress="powersgd", powersgd_rank=4, powersgd_start=2), "fp64", 4)
    assert all(torch.equal(compressed[0][name], value) for name, value in compressed[1].items())
    norms = [sum(float(value.square().sum()) for value in one.values()) ** 0.5 for one in (compressed[0], plain[0])]
    assert norms[0] == pytest.approx(norms[1], rel=0.3)
    assert 1e-6 < _error(compressed[0], plain[0]) < 1
    before = ranks(2, _gradients, DDP, Comm(compress="powersgd", powersgd_start=2), "fp64", 2)
    assert _error(before[0], ranks(2, _gradients, DDP, DEFAULT_COMM, "fp64", 2)[0]) < 1e-12


def _messages(layout, comm, microbatches):
    """Return the number of reductions started before each microbatch of a second step, and in the complete step."""
    mesh = mesh_of(layout)
    model = build(SPECS["llama"], mesh, PRECISIONS["fp32"], weights=0, comm=comm)
    forward_backward(model, mesh, 0, microbatches)
    begun, counts, names = [], [], ("all_reduce", "reduce_scatter_tensor", "reduce_scatter_single")
    originals = {name: getattr(dist, name) for name in names if hasattr(dist, name)}

    def counted(function):
        def run(*args, **kwargs):
            begun.append(function)
            return function(*args, **kwargs)

        return run

    for name, function in originals.items():
        setattr(dist, name, counted(function))
    try:
        unwrap(model).register_forward_pre_hook(lambda *_: counts.append(len(begun)))
        forward_backward(model, mesh, 1, microbatches)
    finally:
        for name, function in originals.items():
            setattr(dist, name, function)
    return counts, len(begun)


@pytest.mark.parametrize("layout", [DDP, Layout(dp_shard=2, zero=1)])
def test_nothing_is_sent_before_the_last_microbatch(ranks, layout):
    counts, total = ranks(layout.world_size, _messages, layout, DEFAULT_COMM, 3)[0]
    assert counts == [0, 0, 0]
    assert total > 0


def test_small_buckets_make_more_messages(ranks):
    large, small = (ranks(2, _messages, DDP, Comm(bucket_mb=size), 1)[0][1] for size in (25, 0.01))
    assert small > large


@pytest.mark.parametrize("layout", [Layout(dp_shard=2, zero=2), Layout(dp_shard=2, zero=3)])
def test_gathering_further_ahead_changes_nothing(ranks, layout):
    layout = replace(layout, recompute="full")
    plain = ranks(2, _gradients, layout, DEFAULT_COMM, "fp64", 2, 2)
    prefetched = ranks(2, _gradients, layout, Comm(prefetch=2), "fp64", 2, 2)
    for ours, theirs in zip(prefetched, plain):
        assert all(torch.equal(ours[name], value) for name, value in theirs.items())


@pytest.mark.parametrize(
    ("comm", "layout", "microbatches", "sentence"),
    [
        (
            Comm(compress="powersgd"),
            Layout(dp_shard=2, zero=1),
            1,
            "comm.compress='powersgd' works on the gradients of unsharded replicas, but the layout has zero=1",
        ),
        (
            Comm(compress="powersgd"),
            Layout(dp_replicate=2, pp=2),
            1,
            "comm.compress='powersgd' works on the gradients of unsharded replicas, but the layout has zero=0",
        ),
        (Comm(compress="bf16"), Layout(dp_shard=2, zero=1), 4, "gradients of the 4 microbatches of a step in bfloat16"),
        (
            Comm(bucket_mb=1.5),
            Layout(dp_shard=2, zero=3),
            1,
            "comm.bucket_mb=1.5 works on the gradients of unsharded replicas, but the layout",
        ),
        (Comm(prefetch=2), DDP, 1, "comm.prefetch=2 has no effect with zero=0"),
    ],
)
def test_what_has_no_place_is_refused(comm, layout, microbatches, sentence):
    (message,) = illegal_comm(comm, layout, microbatches)
    assert sentence in message


def test_products_overlap_with_messages_between_gpus_of_a_node_only():
    """The error names the setting to change: on CPUs, without sequence parallelism, and across nodes."""
    overlapped = Comm(async_tp=True)
    eight, cpu = (ClusterSpec(kind, Device(kind, kind, 2**30), 8) for kind in ("cuda", "cpu"))
    assert list(illegal_comm(overlapped, Layout(tp=2), 1, eight)) == []
    for layout, cluster, sentence in (
        (Layout(tp=2), cpu, "needs CUDA devices, but the device is cpu; set comm.async_tp = false"),
        (Layout(tp=2, sequence_parallel=False), eight, "tp=2 and sequence_parallel=false, because no activations are"),
        (Layout(dp_shard=2, zero=1), eight, "tp=1 and sequence_parallel=true, because no activations are"),
        (Layout(tp=16), eight, "tp=16 needs tensor-parallel ranks within one node, but nodes have 8 devices"),
    ):
        (message,) = illegal_comm(overlapped, layout, 1, cluster)
        assert sentence in message
    with pytest.raises(LayoutError, match=r"comm\.async_tp=true on cpu with tp=2"):
        build(
            SPECS["llama"],
            Mesh(Layout(tp=2), RankInfo(0, 2, 0, torch.device("cpu")), {}),
            PRECISIONS["fp32"],
            weights=0,
            comm=overlapped,
        )


def _overlapped(schedule):
    """Return a tp rank's gradients with and without overlap, by PyTorch's fallback for memory that is not shared.

    The pipeline has one stage, and defers weight gradients if `schedule` does.
    """
    mesh = mesh_of(Layout(tp=2, schedule=schedule, recompute="selective" if schedule == "1f1b" else "none"))
    results = []
    for use in (False, True):
        model = build(SPECS["qwen"], mesh, PRECISIONS["fp64"], weights=0)
        if use:
            async_tp.overlap_projections(model, mesh.groups["tp"])
            kinds = [type(part.projections) for part in model.modules() if hasattr(part, "projections")]
            assert kinds == [async_tp.OverlappedProjections] * 6  # attention and feed-forward of three layers
        with patch.multiple(async_tp, all_gather_matmul=_gathered, matmul_reduce_scatter=_scattered):
            loss = forward_backward(model, mesh, 0, 2)
        results.append({"loss": torch.tensor(loss)} | {name: one.grad for name, one in model.named_parameters()})
    return results


def _gathered(x, matrices, group, *, keep):
    from torch.distributed._symmetric_memory import _fused_all_gather_matmul_fallback as compute

    return compute(x, matrices, 0, group, return_A=keep)


def _scattered(x, matrix, group):
    from torch.distributed._symmetric_memory import _fused_matmul_reduce_scatter_fallback as compute

    return compute(x, matrix, "sum", 0, group)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_overlapped_products_are_the_same(ranks, schedule):
    for plain, overlapped in ranks(2, _overlapped, schedule):
        assert all(torch.allclose(overlapped[name], value, rtol=1e-10, atol=1e-14) for name, value in plain.items())


def test_what_has_a_place_is_taken():
    assert list(illegal_comm(Comm(compress="powersgd", bucket_mb=1.0), DDP, 4)) == []
    assert list(illegal_comm(Comm(compress="bf16", prefetch=1), Layout(dp_shard=2, zero=2), 4)) == []
