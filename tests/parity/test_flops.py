"""The ledger's FLOPs against those that PyTorch counts in transformers' own models of every family and variant."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from kumi.spec import families, ledger
from tiny_models import CASES, reference_of

# transformers scans otherwise than kumi.
SCANNED = ("nemotron-h", "nemotron-h-moe", "nemotron-h-omni")


@pytest.mark.parametrize("name", [name for name in CASES if name not in SCANNED])
def test_flops_of_the_forward_pass(name):
    family, changes = CASES[name]
    # Heads are computed by matmuls that PyTorch's counter knows.
    theirs = reference_of(family, {**changes, "attn_implementation": "eager"})
    theirs.set_attn_implementation("eager")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        theirs(input_ids=torch.zeros(2, 24, dtype=torch.int64), use_cache=False)
    spec = families.from_hf(theirs.config.to_dict())
    assert counter.get_total_flops() == ledger.forward_flops(spec, tokens=48, seq_len=24)
