"""Requests of `kumi plan` that nobody means well: each is answered, or refused in one sentence that is true."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "plan"))

from small import job, model

from kumi.errors import LayoutError
from kumi.report.planning import plan


def refused(wanted, pinned, **fields):
    with pytest.raises(LayoutError) as error:
        plan(wanted, pinned, **fields)
    return str(error.value)


def test_pins_that_are_refused_are_not_blamed_for_what_was_left_open():
    """Stages and ZeRO are open, so that it is not for their defaults that nothing is legal."""
    said = refused(job(of=model(16), sequences=8), {"schedule": "dualpipe", "pp": 8})
    assert "needs at least 2 x pp = 16 microbatches" in said
    for pinned in ({"pp": 2, "dp_shard": 3}, {"dp_replicate": 3}):
        said = refused(job(), pinned)
        assert "degrees must multiply to 8" in said
        assert "zero" not in said


def test_a_schedule_without_a_pipeline_is_refused_with_the_reason():
    assert "layout.pp=1 has none" in refused(job(), {"schedule": "zb-v", "pp": 1})
