"""Fitting recovers the latency and bandwidth from which times were computed."""

import numpy as np
import pytest
from measured import CPU, GPU, LINK, transfers

from kumi.bench.fit_links import fit_line, fit_link
from kumi.spec.cluster import Link

SIZES = [2.0**power for power in range(12, 26, 2)]


def test_a_line_is_found_again():
    fitted = fit_line(SIZES, [2e-4 + size / 3e9 for size in SIZES])
    assert (fitted.latency, fitted.bandwidth) == (pytest.approx(2e-4), pytest.approx(3e9))
    assert fitted.error == pytest.approx(0, abs=1e-9)


def test_noise_of_a_tenth_moves_a_line_by_less():
    noise = 1 + 0.1 * np.random.default_rng(0).uniform(-1, 1, len(SIZES))
    fitted = fit_line(SIZES, noise * [2e-4 + size / 3e9 for size in SIZES])
    assert fitted.latency == pytest.approx(2e-4, rel=0.1)
    assert fitted.bandwidth == pytest.approx(3e9, rel=0.1)
    assert 0.01 < fitted.error < 0.1


def test_neither_figure_is_negative():
    falling = fit_line(SIZES, [1e-2 - 1e-3 * index for index in range(len(SIZES))])
    assert falling.bandwidth == np.inf
    assert falling.latency > 0
    steep = fit_line(SIZES, [size**1.3 / 1e9 for size in SIZES])
    assert steep.latency == 0
    assert 0 < steep.bandwidth < np.inf


@pytest.mark.parametrize("link", [LINK, Link("fast", 4, 4e11, 5e-6, 1.0), Link("slow", 4, 1e7, 2e-2, 1.0)])
@pytest.mark.parametrize("device", [CPU, GPU], ids=["cpu", "cuda"])
def test_a_link_is_found_again_through_the_planner_s_formulas(link, device):
    fitted, error = fit_link(link.name, 4, device.kind, transfers(link, device))
    assert fitted.bandwidth == pytest.approx(link.bandwidth, rel=1e-4)
    assert fitted.latency == pytest.approx(link.latency, rel=1e-3)
    assert error < 1e-4
