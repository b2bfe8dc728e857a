from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kumi.data.feistel import key, permute


@given(st.integers(1, 3000), st.integers(-(2**63), 2**64))
def test_a_permutation_is_a_bijection(size, seed):
    order = permute(np.arange(size, dtype=np.uint64), size, key(seed))
    assert sorted(order.tolist()) == list(range(size))


def test_keys_give_different_orders_and_places_can_be_asked_for_alone():
    size = 1000
    places = np.arange(size, dtype=np.uint64)
    orders = [permute(places, size, key(0, epoch)) for epoch in range(20)]
    assert len({tuple(order.tolist()) for order in orders}) == 20
    assert [int(permute(places[n : n + 1], size, key(0, 3))[0]) for n in range(20)] == orders[3][:20].tolist()
    fixed = np.mean([np.count_nonzero(order == places) for order in orders])
    assert fixed < 4  # a random order keeps one place on average


def test_each_place_is_reached_evenly():
    size, keys = 7, 7000
    counts = np.bincount(
        permute(np.full(keys, 3, np.uint64), size, key(1, np.arange(keys))).astype(int), minlength=size
    )
    assert counts.min() > 850
    assert counts.max() < 1150


@pytest.mark.parametrize("size", [2**40 + 7, 2**62])
def test_large_sizes_stay_inside_and_do_not_collide(size):
    permuted = permute(np.arange(5000, dtype=np.uint64), size, key(5))
    assert permuted.max() < size
    assert len(set(permuted.tolist())) == 5000
