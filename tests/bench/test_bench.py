"""`kumi bench` on tiny work: everything is measured, on one rank and on two, and the file can be planned with."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from kumi.bench import clock, measuring_rank, run_bench, time_collectives, time_kernels
from kumi.bench.measurements import Timing, read_measurements
from kumi.cli import main
from kumi.config.cluster_source import cluster_spec
from kumi.config.job_sections import ClusterSection
from kumi.launch.signals import StopFlag
from kumi.parallel.mesh import RankInfo
from kumi.spec.numerics import REFERENCE
from steps import mesh_of

TINY = replace(
    time_kernels.SIZES["cpu"],
    squares=(16, 32),
    peak=64,
    shapes=((48, 16, 31),),
    linears=((32, 16, 16),),
    copy=2**12,
    tokens=32,
    hidden=128,
    vocab=64,
    attention=((1, 16, 2, 1, 64), (1, 32, 2, 1, 64), (1, 48, 2, 1, 64)),
    update=2**20,
)


def shrink(patch):
    """Make all work tiny; `patch(thing, name, value)` sets an attribute or, of a dict, an item."""
    patch(time_kernels.SIZES, "cpu", TINY)
    patch(time_collectives._MAX_BYTES, "cpu", 2**16)
    patch(clock, "SAMPLE_S", 1e-4)
    patch(measuring_rank, "BUDGET", 1e-3)
    patch(measuring_rank, "QUICK_BUDGET", 1e-3)
    patch(time_kernels, "QUICK_TOKENS", 32)


@pytest.fixture
def tiny(monkeypatch):
    shrink(
        lambda thing, name, value: (monkeypatch.setitem if isinstance(thing, dict) else monkeypatch.setattr)(
            thing, name, value
        )
    )
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    environ = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(environ)
    torch.set_float32_matmul_precision("highest")


def test_one_rank_from_the_command_line(tiny, tmp_path, capsys):
    file = tmp_path / "machine.toml"
    assert main(["bench", "--ranks", "1", "--quick", "--out", str(file)]) == 0
    assert "matrix products" in capsys.readouterr().out
    cluster = cluster_spec(ClusterSection(source=str(file)))
    assert cluster.devices == 1
    assert cluster.device.peak_flops("float32") > 0
    assert main(["bench", "--ranks", "1", "--out", str(file)]) == 2
    assert "is not overwritten" in capsys.readouterr().err


def test_json_holds_every_timing(tiny, capsys):
    assert main(["bench", "--ranks", "1", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    measurements = read_measurements(printed["found"])
    assert {one.kind for one in measurements.kernels} == {
        "launch",
        "copy",
        "update",
        "product",
        "linear",
        "element-wise",
        "attention",
        "read",
    }
    assert all(one.seconds > 0 for one in measurements.kernels)
    assert "[device]" in printed["toml"]


def test_a_rank_of_a_launcher_is_refused(tiny, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert main(["bench"]) == 2
    assert "without torchrun" in capsys.readouterr().err


def test_more_ranks_than_gpus_are_refused(monkeypatch):
    gpus = replace(cluster_spec(ClusterSection(source="h100-sxm")), devices_per_node=8)
    monkeypatch.setattr(run_bench, "cluster_spec", lambda section: gpus)
    with pytest.raises(run_bench.ConfigError, match="--ranks 9, but this machine has 8 GPUs"):
        run_bench.machine_to_measure(9)


def _measured(quick):
    from kumi.spec.layout import Layout

    shrink(
        lambda thing, name, value: (
            thing.__setitem__(name, value) if isinstance(thing, dict) else setattr(thing, name, value)
        )
    )
    mesh = mesh_of(Layout(dp_replicate=torch.distributed.get_world_size()))
    measurements = measuring_rank._measure(
        measuring_rank.BenchRequest("cpu", ("float32", "float16"), "float16", quick, REFERENCE), mesh, StopFlag()
    )
    torch.set_float32_matmul_precision("highest")  # the rank lives on, for other tests
    return measurements


@pytest.mark.parametrize(("world", "quick"), [(2, False), (4, True)])
def test_ranks_measure_every_collective_in_every_group(ranks, world, quick):
    first, *others = ranks(world, _measured, quick)
    assert all((one.kernels, one.transfers) == (first.kernels, first.transfers) for one in others)  # they agree
    sizes = {2**12, 2**14, 2**16} if not quick else {2**12, 2**16}
    expected = {(kind, degree, size) for kind in time_collectives.KINDS for degree in {2, world} for size in sizes}
    assert {(one.kind, one.degree, one.size) for one in first.transfers} == expected
    assert not first.of("attention", "float32")
    assert {item.tokens for item in first.of("attention", "float16")} == {16, 32} | (set() if quick else {48})
    assert {one.dtype for one in first.of("product")} == {"float32", "float16"}
    assert all(one.seconds > 0 for one in first.transfers)


def _stopped():
    from kumi.spec.layout import Layout

    mesh, flag = mesh_of(Layout(dp_replicate=2)), StopFlag()
    flag.requested = 15 if mesh.rank == 1 else None
    try:
        request = measuring_rank.BenchRequest("cpu", ("float32",), "float32", True, REFERENCE)
        measuring_rank._measure(request, mesh, flag)
    except measuring_rank.Stopped as stopped:
        return stopped.signum
    return None


def test_a_signal_to_one_rank_stops_all(ranks):
    assert ranks(2, _stopped) == [15, 15]


def test_nothing_here_needs_torch_before_ranks_start():
    program = "import sys, kumi.bench; assert not {'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_attention_that_would_take_long_is_left_out():
    """By the best speed so far, 1 TFLOP/s; matmuls of the same size are not."""
    timings = [Timing("attention", "float32", "forward", 1e9, seconds, 256) for seconds in (1e-3, 2e-3)]
    limit = 1e12 * measuring_rank.LONGEST_S
    kernel = time_kernels.Kernel("attention", "float32", "forward", limit * 1.01, lambda: None, 8192)
    assert measuring_rank._too_long(kernel, timings)
    assert not measuring_rank._too_long(replace(kernel, amount=limit * 0.99), timings)
    assert not measuring_rank._too_long(kernel, [])
    assert not measuring_rank._too_long(replace(kernel, kind="product", tokens=0), timings)


def test_work_is_timed_by_the_call():
    calls = []
    seconds = clock.seconds_of(lambda: calls.append(1), torch.device("cpu"), 0.0)
    assert 0 < seconds < clock.SAMPLE_S
    assert len(calls) > 100


def test_messages_divide_the_world():
    place = RankInfo(0, 6, 0, torch.device("cpu"))
    degrees = {case.degree for case in time_collectives.cases(place.world_size, "cpu", quick=False)}
    assert degrees == {2, 3, 6}
