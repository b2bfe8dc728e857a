"""Short measurements for all tests of the doctor's nodes; only those of slow devices and links judge the speed."""

import pytest

import kumi.train.loop  # noqa: F401  (the nodes are forked, and would import it each)
from kumi.doctor import speed_checks


@pytest.fixture(autouse=True)
def _short_measurements(request, monkeypatch):
    """Other tests run at the same time, and slow one node or link down: only tests of slow ones judge the speed."""
    monkeypatch.setattr(speed_checks, "_SECONDS", 0.4 if "slow" in request.node.name else 0.1)
    if "slow_core" not in request.node.name:
        monkeypatch.setattr(speed_checks, "SLOW", 0.999)
        monkeypatch.setattr(speed_checks, "NOTICED", 0.999)
    if "slow_link" not in request.node.name:
        monkeypatch.setattr(speed_checks, "SLOW_PAIR", 0.999)
        monkeypatch.setattr(speed_checks, "NOTICED_PAIR", 0.999)
