"""Fixtures that every test may use, and which tests run: some of a grid by default, all of them with `--all`."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

sys.path.insert(0, str(Path(__file__).parent))

from kumi.config.numerics import given
from kumi.spec.numerics import REFERENCE
from ranks import Ranks, run_ranks
from workers import Workers

# Runs compute as they did before anything was measured, whatever the machine, unless what tests force says otherwise.
os.environ.setdefault("KUMI_NUMERICS", "reference")

# A background shell starts its jobs with Ctrl-C ignored, and nohup with SIGHUP, which the tests of signals must not
# inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Every `@given` draws the same examples on every machine, and none of them depends on how fast the machine is. The
# search draws others each time, ten times as many where a test does not say how many.
settings.register_profile(
    "fixed", derandomize=True, database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile(
    "search", settings.get_profile("fixed"), derandomize=False, max_examples=1000, print_blob=True
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds --all."""
    parser.addoption("--all", action="store_true", help="whole grids, and random examples searched for anew")


def pytest_configure(config: pytest.Config) -> None:
    """Chooses the profile before the first test file is read."""
    settings.load_profile("search" if config.getoption("--all") else "fixed")
    if (numerics := given() or REFERENCE) != REFERENCE:
        from kumi.nn.numerics import use

        use(numerics)
    if not config.getoption("--all"):
        # Hypothesis also draws constants of the modules that are imported, which depends on the files that ran before.
        providers._get_local_constants = lambda: providers._local_constants


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves the tests marked `exhaustive` out, unless all are asked for."""
    if config.getoption("--all"):
        return
    left_out = [item for item in items if item.get_closest_marker("exhaustive")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("exhaustive")]


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Workers:
    """Splits the tests between workers."""
    return Workers(config, log)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """`ranks(world_size, function, *args)` runs `function` on gloo ranks kept between tests (`tests/ranks.py`)."""
    yield run_ranks
    run_ranks.stop()
