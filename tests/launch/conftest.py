"""Fixtures for tests of launchers; `small` is a finished run."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from mini_slurm import MISSING, MiniSlurm
from tests.train.conftest import small

__all__ = ["small"]


@pytest.fixture(scope="session")
def slurm_cluster(tmp_path_factory):
    """A real Slurm with three nodes; skipped where Slurm is not installed."""
    if MISSING:
        pytest.skip(f"needs Slurm (apt-get install slurm-wlm); missing here: {', '.join(MISSING)}")
    with MiniSlurm(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster
