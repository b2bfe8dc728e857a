"""Fixtures that every test may use."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))

from ranks import Ranks, run_ranks

# A background shell starts its jobs with Ctrl-C ignored, and nohup with SIGHUP, which the tests of signals must not
# inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# How long an example takes depends on what else the machine does.
settings.register_profile("kumi", deadline=None)
settings.load_profile("kumi")


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """`ranks(world_size, function, *args)` runs `function` on gloo ranks kept between tests (`tests/ranks.py`)."""
    yield run_ranks
    run_ranks.stop()
