"""Seconds of single operations: bounded by the data sheet, measured efficiency and memory bandwidth."""

from dataclasses import replace

import numpy as np
import pytest
from small import GPU, job

from kumi.errors import ConfigError
from kumi.plan.estimate import estimate
from kumi.plan.time.kernel_times import (
    alignment_efficiency,
    attention_shares,
    matmul_seconds,
    peak_flops,
    stream_seconds,
)
from kumi.spec.cluster import Device
from kumi.spec.layout import Layout

DEVICE = Device(
    "test",
    "cuda",
    80 * 2**30,
    peak=(("bfloat16", 1e15),),
    memory_bandwidth=3e12,
    stream=1.0,
    matmul=(("bfloat16", 0.8),),
    processors=128,
)


def seconds(rows, inner, columns, device=DEVICE):
    return float(matmul_seconds(device, "bfloat16", np.array(rows), np.array(inner), np.array(columns)))


def test_a_large_product_reaches_the_ceiling_and_never_more():
    ideal = 2 * 16384**3 / (0.8 * 1e15)
    assert ideal <= seconds(16384, 16384, 16384) <= 1.05 * ideal


def test_a_wave_more_takes_a_wave_longer():
    # 128 processors take 128 tiles of 128 x 256 at once; kernels that split the inner dimension fill quarters.
    one_wave, two_waves = seconds(128 * 16, 8192, 256 * 8), seconds(128 * 17, 8192, 256 * 8)
    assert two_waves / one_wave >= 1.06
    assert seconds(128, 8192, 256) < 0.5 * one_wave


def test_odd_sizes_are_slower():
    even = seconds(8192, 4096, 10944)
    assert seconds(8192, 4096, 10922) > 1.3 * even
    assert (np.diff(alignment_efficiency(np.array([1, 2, 4, 8, 16, 32, 64]))) > 0).all()
    assert alignment_efficiency(np.array([64, 128, 4096])).tolist() == [1, 1, 1]


def test_thin_products_are_bound_by_memory():
    moved = 2 * (1 * 8192 + 8192 * 8192 + 1 * 8192)
    assert seconds(1, 8192, 8192) >= moved / 3e12


def test_an_unknown_peak_is_an_error_that_says_what_is_known():
    with pytest.raises(ConfigError, match=r"float8 is not known .known: bfloat16.; measure it with `kumi bench`"):
        peak_flops(DEVICE, "float8")


def test_without_a_known_bandwidth_only_products_count():
    device = replace(DEVICE, memory_bandwidth=0.0)
    assert float(stream_seconds(device, np.array(1e9))) == 0
    assert seconds(4096, 4096, 4096, device) > 0


def test_attention_has_one_speed_where_lengths_are_not_measured():
    shares = attention_shares(replace(DEVICE, attention=(0.6, 0.5)), np.array([100.0, 1e5]))
    assert [each.tolist() for each in shares] == [[0.6, 0.6], [0.5, 0.5]]


@pytest.mark.parametrize(
    ("tokens", "speeds"),
    [(64, (0.25, 0.5)), (256, (0.25, 0.5)), (512, (0.5, 0.625)), (1024, (0.75, 0.75)), (2048, (1, 1)), (1e6, (1, 1))],
)
def test_attention_is_interpolated_by_the_logarithm_of_the_length(tokens, speeds):
    lengths = ((256, 0.25, 0.5), (1024, 0.75, 0.75), (2048, 1.0, 1.0))
    device = replace(DEVICE, attention=(0.4, 0.2), attention_lengths=lengths)
    assert tuple(map(float, attention_shares(device, tokens))) == pytest.approx((0.4 * speeds[0], 0.2 * speeds[1]))


@pytest.mark.parametrize(("span", "speed"), [(None, 1.0), (256.0, 0.25)])
def test_a_step_has_the_speed_of_its_documents(span, speed):
    """In rows of 2,048 tokens, of one document or of documents that cost as much as those of 256 tokens."""
    device = replace(GPU, attention=(0.4, 0.2), attention_lengths=((256, 0.25, 0.25), (2048, 1.0, 1.0)))
    plain = replace(device, attention=(0.4 * speed, 0.2 * speed), attention_lengths=())
    seconds = []
    for each in (device, plain):
        task = job(device=each, seq_len=2048)
        batch = replace(task.batch, document_span=span)
        seconds.append(estimate(replace(task, batch=batch), Layout(dp_replicate=8)).step_seconds)
    assert seconds[0] == pytest.approx(seconds[1])
