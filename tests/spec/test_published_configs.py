"""The configurations of published checkpoints: what the data says of itself, and that kumi accepts every one."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

FILES = sorted((Path(__file__).parents[1] / "published_configs").glob("*.json"))
PUBLISHED: dict[str, dict[str, Any]] = {entry["id"]: entry for entry in (json.loads(f.read_text()) for f in FILES)}


def test_there_are_sixty_each_with_its_source():
    assert len(PUBLISHED) == len(FILES) >= 60
    assert all(entry["source"] for entry in PUBLISHED.values())


@pytest.mark.parametrize("id", [id for id, entry in PUBLISHED.items() if "sha256" in entry])
def test_the_values_are_those_of_the_file_whose_digest_is_on_record(id):
    config, digests = PUBLISHED[id]["config"], set()
    for sort in (True, False):
        text = json.dumps(config, indent=2, sort_keys=sort)
        digests |= {hashlib.sha256((text + end).encode()).hexdigest() for end in ("", "\n")}
    assert PUBLISHED[id]["sha256"] in digests
