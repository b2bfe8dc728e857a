"""Fixtures for all tests, and the selection of tests: part of each grid by default, everything with `--all`."""

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

from kumi.config.numerics import numerics_from_environment
from kumi.spec.numerics import REFERENCE
from ranks import Ranks, run_ranks
from workers import Workers

# Runs use the reference numerics, without a measurement, unless a test or the environment says otherwise.
os.environ.setdefault("KUMI_NUMERICS", "reference")

# A shell starts background jobs with SIGINT ignored, and nohup ignores SIGHUP. Tests of signals must not inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Profile "fixed": every `@given` draws the same examples on every machine, whatever its speed. Profile "search": other
# examples each time, and ten times as many unless a test sets their number.
settings.register_profile(
    "fixed", derandomize=True, database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile(
    "search", settings.get_profile("fixed"), derandomize=False, max_examples=1000, print_blob=True
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --all."""
    parser.addoption("--all", action="store_true", help="run complete grids, and draw new random examples")


def pytest_configure(config: pytest.Config) -> None:
    """Choose the profile before the first test file is imported."""
    settings.load_profile("search" if config.getoption("--all") else "fixed")
    if (numerics := numerics_from_environment() or REFERENCE) != REFERENCE:
        from kumi.nn.numerics import use_numerics

        use_numerics(numerics)
    if not config.getoption("--all"):
        # Hypothesis also draws constants from imported modules, which depend on the files that ran before.
        providers._get_local_constants = lambda: providers._local_constants


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests marked `exhaustive`, unless --all is given."""
    if config.getoption("--all"):
        return
    exhaustive = [item for item in items if item.get_closest_marker("exhaustive")]
    if exhaustive:
        config.hook.pytest_deselected(items=exhaustive)
        items[:] = [item for item in items if not item.get_closest_marker("exhaustive")]


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Workers:
    """Split the tests between workers (see `tests/workers.py`)."""
    return Workers(config, log)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """`ranks(world_size, function, *args)` runs `function` on gloo ranks that live between tests (`tests/ranks.py`)."""
    yield run_ranks
    run_ranks.stop()
