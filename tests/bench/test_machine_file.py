"""Measurements become a cluster file that `cluster.source` accepts, with the figures that were measured."""

from dataclasses import replace

import pytest
from measured import CPU, GPU, LINK, measurements, transfers

from kumi.bench.cluster_toml import node_toml, refuse_existing, write_new
from kumi.bench.describe_machine import node_of, remarks
from kumi.config.cluster_source import cluster_spec
from kumi.config.job_sections import ClusterSection
from kumi.config.presets import preset_names, read_node
from kumi.errors import ConfigError, RefusedError
from kumi.spec.cluster import Device


def written(tmp_path, measured, base, ranks):
    file = tmp_path / "machine.toml"
    write_new(file, node_toml(node_of(measured, base, ranks), remarks(measured, base, ranks, 0.1)), "--out")
    return cluster_spec(ClusterSection(source=str(file)))


def test_a_cpu_file_loads_with_what_was_measured(tmp_path):
    cluster = written(tmp_path, measurements(transfers=transfers()), CPU, 4)
    device, (link,) = cluster.device, cluster.links
    assert (device.name, device.kind, device.memory, cluster.devices_per_node) == ("Testor 3000", "cpu", CPU.memory, 4)
    assert device.peak_flops("bfloat16") == 2e11
    assert device.matmul_share("bfloat16") == pytest.approx(2 / (1 / 0.8 + 1 / 0.4), rel=1e-3)  # the rate of layers
    assert device.memory_bandwidth == 2e10
    assert device.stream == pytest.approx(0.4)
    assert device.attention == (0.25, 0.2)  # in the longest documents
    assert device.attention_lengths == ((256, 0.5, 0.5), (2048, 1.0, 1.0))
    assert device.launch == pytest.approx(5e-6)
    # 100 MB at 5 GB/s, less 8 rows of FLOPs at the speed of linear layers.
    layers = {dtype: device.peak_flops(dtype) * device.matmul_share(dtype) for dtype, _ in device.read}
    read = {
        dtype: 1e8 / (0.02 - 16 * 1e8 / size / layers[dtype]) / 2e10
        for dtype, size in (("float32", 4), ("bfloat16", 2))
    }
    assert dict(device.read) == pytest.approx(read, rel=1e-3)
    assert device.reserved == 300 * 2**20
    assert link.span == 4
    assert link.bandwidth == pytest.approx(LINK.bandwidth, rel=1e-3)
    assert link.latency == pytest.approx(LINK.latency, rel=1e-3)
    assert cluster.assumed == ()


@pytest.mark.parametrize(("base", "processors"), [(CPU, 0), (GPU, 80)])
def test_no_share_is_above_one(base, processors, tmp_path):
    """Other work may hit one measurement and spare another."""
    measured = measurements(processors=processors, speed=1e15, memory=3e12)
    slow = ("product", "copy", "update")
    kernels = tuple(one if one.kind in slow else replace(one, seconds=one.seconds / 100) for one in measured.kernels)
    device = written(tmp_path, replace(measured, kernels=kernels), base, 1).device
    assert device.stream == 1
    assert max(*device.attention, *dict(device.matmul).values()) <= 1


def test_a_gpu_keeps_its_data_sheet_and_shares_are_of_that(tmp_path):
    cluster = written(tmp_path, measurements(processors=132, speed=4e14, memory=2e12), GPU, 1)
    device = cluster.device
    assert device.peak_flops("bfloat16") == 1e15
    assert device.matmul_share("bfloat16") == pytest.approx(0.8)  # of the large squares alone
    assert device.memory_bandwidth == 3e12
    assert device.stream == pytest.approx(0.4 * 2 / 3, rel=1e-3)
    assert device.processors == 132
    assert dict(device.read) == pytest.approx({"float32": 1 / 6, "bfloat16": 1 / 6}, rel=1e-3)
    assert device.watts == 700
    assert cluster.links == ()


def test_what_was_not_measured_is_left_out(tmp_path):
    measured = measurements(processors=80)
    bare = replace(measured, kernels=tuple(one for one in measured.kernels if one.kind != "attention"))
    assert written(tmp_path, bare, GPU, 1).device.attention == Device("", "cuda", 1).attention


def test_lengths_with_one_direction_are_left_out(tmp_path):
    """A slow device skips long kernels; the longest complete length is then the reference of all others."""
    measured = measurements()
    kernels = tuple(item for item in measured.kernels if not item.what.startswith("backward 1x2048"))
    device = written(tmp_path, replace(measured, kernels=kernels), CPU, 1).device
    assert (device.attention, device.attention_lengths) == ((0.125, 0.1), ())


@pytest.mark.parametrize(
    ("tokens", "words"),
    [((512, 256), "tokens .512, 256. do not increase"), ((256, 256), "do not increase"), ((0,), "greater than 0")],
)
def test_lengths_of_attention_increase(tokens, words, tmp_path):
    text = node_toml(node_of(measurements(), CPU, 1))
    tables = "".join(f"{{tokens = {count}, forward = 1.0, backward = 1.0}}," for count in tokens)
    head, _, rest = text.partition("by_length = [")
    (tmp_path / "machine.toml").write_text(f"{head}by_length = [{tables}]\n{rest.partition(']')[2]}")
    with pytest.raises(ConfigError, match=words):
        cluster_spec(ClusterSection(source=str(tmp_path / "machine.toml")))


def test_the_file_says_with_what_it_was_measured():
    text = node_toml(node_of(measurements(), CPU, 1), remarks(measurements(), CPU, 1, 0.25))
    assert text.startswith(
        "# Measured by kumi bench: 1 x Testor 3000, 1 thread per rank, torch 2.13.0; load before 0.2."
    )
    assert "#   bfloat16  forward 999x999x999" in text


@pytest.mark.parametrize("preset", preset_names())
def test_every_preset_survives_being_written(preset, tmp_path):
    (tmp_path / "copy.toml").write_text(node_toml(read_node(preset)))
    assert read_node(str(tmp_path / "copy.toml")) == read_node(preset)


@pytest.mark.parametrize(
    ("name", "words"),
    [("there.toml", "is not overwritten"), ("a.txt", "end in .toml"), ("no/a.toml", "does not exist")],
)
def test_files_that_are_not_written(name, words, tmp_path):
    (tmp_path / "there.toml").write_text("mine")
    with pytest.raises(RefusedError, match=words):
        refuse_existing(tmp_path / name, "--out")
    with pytest.raises(RefusedError, match="is not overwritten"):
        write_new(tmp_path / "there.toml", "yours", "--out")
    assert (tmp_path / "there.toml").read_text() == "mine"
