"""Seconds of single operations: bounded by the data sheet, measured efficiency and memory bandwidth."""

from dataclasses import replace

import numpy as np
import pytest

from kumi.errors import ConfigError
from kumi.plan.time.kernel_times import alignment_efficiency, matmul_seconds, peak_flops, stream_seconds
from kumi.spec.cluster import Device

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
