"""The cache that generation allocates has the bytes that a plan counts, for every kind of layer."""

import pytest
import torch

from kumi.nn.generation_cache import GenerationCache
from kumi.spec.cache_state import cache_bytes
from steps import SPECS


@pytest.mark.parametrize("family", SPECS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_the_cache_has_the_planned_bytes(family, dtype):
    spec, device = SPECS[family], torch.device("cpu")
    for slots, capacity in ((1, 5), (3, 40)):
        cache = GenerationCache(spec, slots, capacity, dtype=getattr(torch, dtype), device=device)
        assert cache.nbytes == cache_bytes(spec, slots, capacity, dtype)
