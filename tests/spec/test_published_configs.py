"""The configurations of published checkpoints have their sources, and kumi accepts every one."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from kumi.spec import families
from kumi.spec.ledger import num_params

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


@pytest.mark.parametrize("id", PUBLISHED)
def test_every_one_is_accepted_as_the_model_that_it_is(id):
    entry = PUBLISHED[id]
    spec = families.from_hf(entry["config"])
    families.check_trainable(spec)
    assert num_params(spec) == entry.get("parameters", num_params(spec))
    assert families.from_hf(families.to_hf(spec)) == spec


def test_there_is_one_of_every_family_that_any_is_published_of():
    """`ministral` and `nemotron_h_omni` are how transformers 5 writes models that are published otherwise."""
    read = {families.from_hf(entry["config"]).family for entry in PUBLISHED.values()}
    assert set(families.FAMILIES) - read == {"ministral", "nemotron_h_omni"}


def test_weights_in_blocks_of_fp8_are_read_and_said():
    assert any(
        "quantized by 'fp8'" in note for note in families.from_hf(PUBLISHED["Qwen/Qwen3-32B-FP8"]["config"]).notes
    )


def test_weights_that_kumi_cannot_read_are_said_to_be_planned_only():
    config = PUBLISHED["Qwen/Qwen3-32B-FP8"]["config"] | {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    assert any("'gptq', which kumi cannot read" in note for note in families.from_hf(config).notes)
